"""Whose device memory is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from oomwatch.attribution import (
    UNKNOWN,
    Attribution,
    Neighbour,
    engine_overhead,
    held_memory,
    process_overhead,
    unowned_memory,
)
from oomwatch.observations import (
    HUNG,
    IMPLAUSIBLE,
    NOT_KNOWN,
    STALE,
    Absent,
    EngineFacts,
    GpuProcess,
    HostProcess,
    Maybe,
    Memory,
)
from oomwatch.snapshot import GpuView, HeldMemory, HeldProcess, Holder, MigView

GIB = 1024**3
CHAT = Holder("engine", "chat")
NO_NUMBER = Absent("NOT_SUPPORTED")


def _process(pid: int, name: str = "python3", **known: object) -> HostProcess:
    process = HostProcess(t=0.0, pid=pid, start=1.0, rss=1, anon=1, name=name)
    return replace(process, **known)  # type: ignore[arg-type]  # a test's few fields


def _attribution(
    *processes: HostProcess,
    engines: Sequence[EngineFacts] = (EngineFacts("chat", pids=(10,)), EngineFacts("embed", pids=(20,))),
    neighbours: Sequence[Neighbour] = (),
) -> Attribution:
    return Attribution(engines, {process.pid: process for process in processes}, neighbours)


# --- holders --------------------------------------------------------------------------------------------------------


def test_a_known_pid_is_its_engines_even_where_proc_tells_nothing() -> None:
    assert _attribution().holder(10) == CHAT


def test_a_process_found_in_an_engines_tree_is_the_engines() -> None:
    assert _attribution(_process(11, engine="chat")).holder(11) == CHAT


def test_an_engine_that_is_no_more_holds_nothing() -> None:
    assert _attribution(_process(11, engine="gone")).holder(11) == UNKNOWN


def test_a_grandchild_is_the_engines() -> None:
    attribution = _attribution(_process(12, ppid=11), _process(11, ppid=10))
    assert attribution.holder(12) == CHAT


def test_a_circle_of_parents_ends() -> None:
    assert _attribution(_process(12, ppid=11), _process(11, ppid=12)).holder(12) == UNKNOWN


def test_the_container_of_one_engine_is_that_engines() -> None:
    attribution = _attribution(_process(10, container="c1"), _process(30, container="c1"), _process(31, container="c2"))
    assert attribution.holder(30) == CHAT
    assert attribution.holder(31) == UNKNOWN


def test_a_container_that_two_engines_share_is_nobodys() -> None:
    attribution = _attribution(_process(10, container="c1"), _process(20, container="c1"), _process(30, container="c1"))
    assert attribution.holder(30) == UNKNOWN


def test_processes_outside_any_container_share_nothing() -> None:
    assert _attribution(_process(10), _process(30)).holder(30) == UNKNOWN


def test_the_worker_of_a_dead_engine_is_unknown_whatever_its_title() -> None:
    assert _attribution(_process(30, "VLLM::Worker_TP0", ppid=1)).holder(30) == UNKNOWN


@pytest.mark.parametrize(
    "neighbour",
    [
        Neighbour("other", process="dcgm*"),
        Neighbour("other", container="abcd"),
        Neighbour("other", pod_uid="6f1c6d4e-1111"),
        Neighbour("other", pod_uid="6f1c6d4e_1111"),
    ],
)
def test_a_configured_neighbour(neighbour: Neighbour) -> None:
    process = _process(30, "dcgm-exporter", container="abcdef", pod_uid="6f1c6d4e-1111")
    assert _attribution(process, neighbours=[neighbour]).holder(30) == Holder("neighbour", "other")


def test_neighbours_patterns_that_do_not_fit() -> None:
    neighbours = [Neighbour("a", process="DCGM*"), Neighbour("b", container="bc"), Neighbour("c", pod_uid="6f1c")]
    process = _process(30, "dcgm-exporter", container="abcdef", pod_uid="6f1c6d4e-1111")
    assert _attribution(process, neighbours=neighbours).holder(30) == UNKNOWN
    assert _attribution(_process(30), neighbours=neighbours).holder(30) == UNKNOWN


def test_a_neighbour_in_an_engines_container_is_a_neighbour_and_an_engines_pid_never_is() -> None:
    neighbours = [Neighbour("any", process="*")]
    attribution = _attribution(_process(10, container="c1"), _process(30, container="c1"), neighbours=neighbours)
    assert attribution.holder(30) == Holder("neighbour", "any")
    assert attribution.holder(10) == CHAT


def test_a_listed_process_with_its_title() -> None:
    attribution = _attribution(_process(10, "VLLM::EngineCore"))
    assert attribution.held(GpuProcess(10, 5)) == HeldProcess(10, 5, CHAT, "VLLM::EngineCore")
    assert attribution.held(GpuProcess(99, None)) == HeldProcess(99, None, UNKNOWN, "")


# --- memory by holder -----------------------------------------------------------------------------------------------


def _held(*used: int | None, holder: Holder = CHAT) -> tuple[HeldProcess, ...]:
    return tuple(HeldProcess(pid, size, holder) for pid, size in enumerate(used, start=10))


def test_memory_of_one_holder_adds_up() -> None:
    processes = (*_held(5, 7), *_held(1, holder=UNKNOWN), *_held(3, holder=Holder("neighbour", "n")))
    assert held_memory(processes) == (
        HeldMemory(CHAT, 12),
        HeldMemory(Holder("neighbour", "n"), 3),
        HeldMemory(UNKNOWN, 1),
    )


def test_an_empty_list_is_held_by_nobody() -> None:
    assert held_memory(()) == ()


def test_a_process_without_a_number_makes_the_sums_unknown() -> None:
    assert held_memory(_held(5, None)) == NO_NUMBER


# --- unowned memory -------------------------------------------------------------------------------------------------

MEMORY = Memory(total=80, reserved=1, used=50, free=29)
LISTED = _held(30, 15)


def _unowned(
    memory: Maybe[Memory] = MEMORY,
    processes: Maybe[tuple[HeldProcess, ...]] = LISTED,
    *,
    sliced: bool = False,
    unified: bool = False,
) -> Maybe[int]:
    return unowned_memory(memory, processes, sliced=sliced, unified=unified)


def test_unowned_memory_is_what_no_listed_process_accounts_for() -> None:
    assert _unowned() == 5
    assert _unowned(processes=()) == 50
    assert _unowned(processes=_held(50)) == 0


def test_unowned_memory_is_absent_where_the_subtraction_means_nothing() -> None:
    assert _unowned(memory=HUNG) == HUNG
    assert _unowned(processes=STALE) == STALE
    assert _unowned(processes=IMPLAUSIBLE) == IMPLAUSIBLE
    assert _unowned(processes=_held(30, None)) == NO_NUMBER
    assert _unowned(processes=_held(51)) == IMPLAUSIBLE
    assert _unowned(sliced=True) == Absent("MIG_ENABLED")
    assert _unowned(unified=True) == Absent("UNIFIED_MEMORY")


def test_used_memory_with_the_drivers_reserve_in_it_is_no_base() -> None:
    assert _unowned(memory=replace(MEMORY, reserved=None)) == NO_NUMBER


# --- overhead -------------------------------------------------------------------------------------------------------

FACTS = EngineFacts("chat", weights_bytes=16 * GIB, kv_pool_bytes=40 * GIB)


def _gpu(uuid: str, processes: Maybe[tuple[HeldProcess, ...]], mig: tuple[MigView, ...] = ()) -> GpuView:
    return GpuView(
        uuid=uuid, index=0, name="", poll=None, memory=STALE, processes=processes, held=STALE, unowned=STALE, mig=mig
    )


def _overhead(*gpus: GpuView, facts: EngineFacts = FACTS) -> object:
    memory = {gpu.uuid: 1 for gpu in gpus} | {mig.uuid: 1 for gpu in gpus for mig in gpu.mig}
    return engine_overhead(facts, memory, gpus)


def test_overhead_is_what_is_held_beyond_weights_and_pool() -> None:
    assert _overhead(_gpu("a", _held(58 * GIB)), _gpu("b", _held(57 * GIB))) == {"a": {10: 2 * GIB}, "b": {10: GIB}}


def test_overhead_of_several_processes_on_a_device_is_told_of_each() -> None:
    """Two contexts of processes that hold nothing else, beside the rank."""
    half = GIB // 2
    assert _overhead(_gpu("a", _held(58 * GIB, half, half))) == {"a": {10: 2 * GIB, 11: half, 12: half}}


def test_overhead_of_a_process_that_is_listed_twice_is_that_of_both_its_contexts() -> None:
    twice = (HeldProcess(10, 57 * GIB, CHAT), HeldProcess(10, GIB, CHAT))
    assert _overhead(_gpu("a", twice)) == {"a": {10: 2 * GIB}}


def test_two_ranks_on_a_device_hold_their_components_each() -> None:
    assert _overhead(_gpu("a", _held(58 * GIB, 57 * GIB))) == {"a": {10: 2 * GIB, 11: GIB}}


def test_others_processes_are_no_overhead_of_the_engines() -> None:
    assert _overhead(_gpu("a", (*_held(58 * GIB), *_held(9 * GIB, holder=UNKNOWN)))) == {"a": {10: 2 * GIB}}


def test_an_engine_that_loads_or_sleeps_has_no_known_overhead() -> None:
    assert _overhead(_gpu("a", _held(20 * GIB))) == {}


def test_overhead_on_a_slice() -> None:
    mig = MigView("m", 1, 0, STALE, _held(58 * GIB), STALE, STALE)
    assert _overhead(_gpu("a", STALE, (mig,))) == {"m": {10: 2 * GIB}}


@pytest.mark.parametrize("missing", ["weights_bytes", "kv_pool_bytes"])
def test_without_the_components_overhead_is_not_known(missing: str) -> None:
    facts = replace(FACTS, **{missing: None})  # type: ignore[arg-type]  # the name of a field
    assert _overhead(_gpu("a", _held(58 * GIB)), facts=facts) == NOT_KNOWN


def test_without_the_engines_memory_its_overhead_is_absent_for_the_same_reason() -> None:
    assert engine_overhead(FACTS, HUNG, ()) == HUNG


def test_a_process_that_cannot_hold_the_components_is_overhead_as_a_whole() -> None:
    assert process_overhead(58, 56) == 2
    assert process_overhead(56, 56) == 0
    assert process_overhead(3, 56) == 3
