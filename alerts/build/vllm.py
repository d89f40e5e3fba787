"""Rules on vLLM's own series alone, for those who run Prometheus and vLLM and no daemon."""

from __future__ import annotations

from collections.abc import Iterator

from alerts.build.links import Links
from alerts.build.model import Alert, Group, RuleFile

INTERVAL = "30s"

USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""vLLM's names of the KV usage, the present one first; it is a share of 1, whatever the name says."""

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
STEPS = "vllm:iteration_tokens_total_count"
PROMPT = "vllm:prompt_tokens_total"
GENERATED = "vllm:generation_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
FINISHED = "vllm:request_success_total"
EXTERNAL = "vllm:external_prefix_cache_queries_total"
# Asleep, or paused, which no other state tells (from 0.26 on).
NOT_AWAKE = 'max without (sleep_state) (vllm:engine_sleep_state{sleep_state="awake"}) == 0'


def vllm_rules(links: Links) -> RuleFile:
    return RuleFile(
        "vllm-plain.yml",
        "Alerts on vLLM's own series, for those who run only Prometheus and vLLM. They see less than oomwatch does, "
        "and each says what it cannot see. Beside oomwatch, leave this file out: both would tell of the same trouble.\n"
        "Data-parallel ranks of one engine are one alert: vLLM's label engine is the rank, and is aggregated away.\n"
        "For vLLM 0.8.5 and newer, both names of the KV usage; series of one page only, so that labels agree.",
        (Group("vllm-plain", INTERVAL, tuple(_alerts(links))),),
    )


def _usage(how: str, window: str) -> str:
    return "(" + " or ".join(f"{how}({name}[{window}])" for name in USAGE) + ")"


def _alerts(links: Links) -> Iterator[Alert]:
    for share, severity in ((0.5, "critical"), (0.03, "warning")):
        yield _alert(
            links,
            "VllmKvCacheIdleFloor",
            f"""
            max without (engine) (
              {_usage("min_over_time", "15m")} > {share:g}
                and max_over_time({RUNNING}[15m]) == 0
                and max_over_time({WAITING}[15m]) == 0
                and {RUNNING} offset 15m == 0
                unless {EXTERNAL} > 0
                unless {NOT_AWAKE}
            )
            """,
            severity,
            "1m",
            "leak",
            summary="vLLM {{ $labels.model_name }} on {{ $labels.instance }} holds {{ humanizePercentage $value }} of "
            "its KV cache although no request was there for 15 minutes",
            description="A vLLM server without requests uses none of its KV cache (cached prefixes do not count). "
            "{{ humanizePercentage $value }} is held by nobody: blocks leak, and when all have leaked the engine "
            "stands still. Only a restart gives them back.",
            action="Save the server's log and its page of metrics, then restart it at a quiet moment.",
            comment=f"Idle for 15 minutes and more than {share:.0%} of the pool in use all the time. "
            "Cannot see: a leak in an engine that is never idle for so long; how fast it grows; leaks of GPU or host "
            "memory. Says it wrongly for vLLM before 0.10.2, where the gauge keeps its last value after the last "
            "request was aborted, and in pools of fewer than 34 blocks before 0.10.2, where one block always counts. "
            "Silent for engines with a KV connector that is in use (it holds blocks for others), asleep or paused.",
        )
    yield _alert(
        links,
        "VllmEngineStuck",
        f"""
        max without (engine) (
          min_over_time({RUNNING}[5m]) + min_over_time({WAITING}[5m]) > 0
            and increase({STEPS}[5m]) == 0
            and increase({GENERATED}[5m]) == 0
            and increase({PROMPT}[5m]) == 0
            and {GENERATED} offset 5m > 0
            unless ({RUNNING} == 1 and {WAITING} == 0 and {USAGE[1]})
            unless {NOT_AWAKE}
        )
        """,
        "critical",
        "1m",
        "capacity",
        summary="vLLM {{ $labels.model_name }} on {{ $labels.instance }} has work and produces no token: it is stuck",
        description="{{ $value }} requests run or wait on one rank, and for 5 minutes no step was made and no token "
        "came out. Its /health may well be green.",
        action="Take it out of the load balancer, save its log and the output of py-spy dump, then restart it.",
        comment="Requests are there and every counter of work stands still. Cannot see: an engine that hangs before "
        "its first token (the grace for compilation and warm-up), one whose gauges still read 0 because the first "
        "batch hangs, one whose page does not answer at all (alert on up), and why it is stuck. A single request that "
        "runs counts only where the usage has its present name alone (0.11.0 and newer): before 0.10.2 one that was "
        "aborted may stay in the gauge. Says it wrongly there where several were aborted at once and nobody came then. "
        "Silent while the engine is asleep or paused.",
    )
    yield _alert(
        links,
        "VllmAdmissionStalled",
        f"""
        max without (engine) (
          min_over_time({WAITING}[10m]) > 0
            and increase({PROMPT}[10m]) == 0
            and sum without (finished_reason) (increase({FINISHED}[10m])) > 0
            and {_usage("max_over_time", "10m")} < 0.9
        )
        """,
        "warning",
        "1m",
        "capacity",
        summary="vLLM {{ $labels.model_name }} on {{ $labels.instance }} admits none of its waiting requests although "
        "its KV cache has room",
        description="{{ $value }} requests wait at least, others finished within 10 minutes, the KV cache was never "
        "more than 90% full, and no prompt was taken up.",
        action="Look in the server's log for a request that can never fit, or for a limit of LoRA adapters.",
        comment="Requests wait, finished ones make room, and no prompt token is processed. Cannot see: a stall while "
        "nothing finishes (VllmEngineStuck sees it once no token comes out), and stalls of some requests while "
        "others are admitted.",
    )
    finished = f"sum without (finished_reason) (increase({FINISHED}[10m]))"
    yield _alert(
        links,
        "VllmPreemptionsHigh",
        f"""
        max without (engine) (
          increase({PREEMPTIONS}[10m])
            and {_usage("max_over_time", "10m")} > 0.9
            and increase({PREEMPTIONS}[10m]) > 0.5 * {finished}
            and {finished} + increase({PREEMPTIONS}[10m]) >= 100
        )
        """,
        "warning",
        "1m",
        "capacity",
        summary="vLLM {{ $labels.model_name }} on {{ $labels.instance }} preempts more than one request for each two "
        "that finish: its KV cache is too small for this load",
        description="{{ humanize $value }} preemptions in 10 minutes. Each preempted request is computed anew, which "
        "costs time and throughput.",
        action="Send less to this server or add one; at its next restart lower --max-num-seqs.",
        comment="Preemptions for each finished request over 10 minutes, as a product and no quotient, so that it also "
        "fires where nothing finishes. A full pool alone is no trouble, and a few preemptions are none (7% of the "
        "requests of a healthy server were preempted once). Cannot see: which requests suffer, and whether the "
        "throughput falls.",
    )
    yield _alert(
        links,
        "VllmMetricsAbsent",
        f"""
        count without (engine, model_name, missing) (
          label_replace({RUNNING} unless ({" or ".join(USAGE)}), "missing", "usage", "", "")
            or
          label_replace({RUNNING} unless {GENERATED}, "missing", "tokens", "", "")
            or
          label_replace({RUNNING} unless {STEPS}, "missing", "steps", "", "")
            or
          label_replace({RUNNING} unless {PREEMPTIONS}, "missing", "preemptions", "", "")
        )
          or
        (
          up{{job=~".*vllm.*"}} == 1
            unless ignoring (engine, model_name) {RUNNING}
            unless ignoring (engine, model_name) {GENERATED} == 0
        )
        """,
        "warning",
        "10m",
        "health",
        summary="vLLM on {{ $labels.instance }} answers without series that the alerts on it need",
        description="Other alerts on vLLM cannot fire for {{ $labels.instance }}: it was started with "
        "--disable-log-stats, its front-end does not have these series, or a new version renamed them.",
        action="Fetch the server's /metrics and compare its names with those in vllm-plain.yml.",
        comment="The input of the rules above, guarded by a series that is there: of vLLM itself, or up of a job with "
        "vllm in its name. Several ranks have no gauges before their first request, and are left alone until then. "
        "Cannot see: targets that are scraped under another job's name and have no vllm series. Says it wrongly for "
        "vLLM 0.8 before its first request.",
    )


def _alert(
    links: Links,
    name: str,
    expr: str,
    severity: str,
    wait: str,
    killer: str,
    *,
    summary: str,
    description: str,
    action: str,
    comment: str,
) -> Alert:
    return Alert(
        alert=name,
        expr=expr,
        severity=severity,
        wait=wait,
        keep="5m",
        labels={"killer": killer},
        annotations={
            "summary": summary,
            "description": f"{description}\nFirst: {action}",
            "action": action,
            "runbook_url": links.runbook(name),
        },
        comment=comment,
    )
