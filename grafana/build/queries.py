"""Parts of PromQL that several panels share."""

from __future__ import annotations

from dataclasses import dataclass

SUBJECT = "killer, verdict, engine, rank, gpu, mig, pid"
"""The labels of a verdict: what is concluded about what."""

JOB = 'job=~"$job"'
NODES = f'{JOB}, instance=~"$instance"'
NODE = f'{JOB}, instance="$instance"'
ENGINE = f'{NODE}, engine="$engine"'
RANKS = f'{ENGINE}, rank=~"$rank"'
ENGINE_OR_ITS_GPUS = f'{NODE}, engine=~"${{engine:regex}}|", gpu=~"${{gpu:regex}}|"'
"""Also what is concluded about a device of the engine, which has no label engine."""
GPU = f'{NODE}, gpu="$gpu"'
GPUS = f'{NODE}, gpu=~"$gpu"'


@dataclass(frozen=True)
class Scope:
    """What a dashboard's variables leave: ``scope(name, 'label="value"')`` selects series of that name within it."""

    matchers: str

    def __call__(self, name: str, *matchers: str) -> str:
        return f"{name}{{{', '.join((self.matchers, *matchers))}}}"


def of(killer: str) -> str:
    return f'killer="{killer}"'


def unsilenced(scope: Scope, *matchers: str) -> str:
    """States of verdicts, without those that a planned silence holds back."""
    silenced = scope("oomwatch_verdict_silenced", *matchers)
    return f"({scope('oomwatch_verdict_state', *matchers)} unless ignoring (reason) {silenced})"


def worst(scope: Scope, *matchers: str, by: str = "") -> str:
    """The worst state; -1 where nothing can be concluded."""
    grouped = f" by ({by})" if by else ""
    unknown = scope("oomwatch_verdict_unknown", *matchers)
    return f"max{grouped} {unsilenced(scope, *matchers)} or -max{grouped} ({unknown})"


def causes_first(states: str, scope: Scope, about: str) -> str:
    """What verdicts are sorted by: their state, and half a step less for a symptom."""
    symptoms = f"max by ({about}) ({scope('oomwatch_verdict_symptom')})"
    return f"{states} - on ({about}) 0.5 * {symptoms} or {states}"


def or_zero(expr: str, witness: str) -> str:
    """0 where there is none of it, as long as the witness is there; without the witness nothing."""
    return f"({expr}) or 0 * count({witness})"


def with_index(expr: str, scope: Scope) -> str:
    """With the GPU's index on the node, which is shorter than its uuid."""
    return f"{expr} * on (job, instance, gpu) group_left (index) {scope('oomwatch_gpu_info')}"
