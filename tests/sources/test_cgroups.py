"""Containers, pods and memory limits from cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.sources.cgroups import Membership, membership, memory_limit

ID = "0123456789abcdef" * 4
UID = "6f1c6d4e-1111-2222-3333-444455556666"
UID_SYSTEMD = UID.replace("-", "_")
V1_UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("path", "container", "pod"),
    [
        (f"/kubepods/burstable/pod{UID}/{ID}", ID, UID),
        (f"/kubepods/pod{UID}/{ID}", ID, UID),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_SYSTEMD}.slice/cri-containerd-{ID}.scope",
            ID,
            UID,
        ),
        (f"/kubepods.slice/kubepods-pod{UID_SYSTEMD}.slice/crio-{ID}.scope", ID, UID),
        (f"/kubepods/besteffort/pod{UID.replace('-', '')}/{ID}", ID, UID.replace("-", "")),
        (f"/system.slice/containerd.service/kubepods-burstable-pod{UID_SYSTEMD}.slice:cri-containerd:{ID}", ID, UID),
        (f"/docker/{ID}", ID, None),
        (f"/system.slice/docker-{ID}.scope", ID, None),
        (f"/machine.slice/libpod-{ID}.scope/container", ID, None),
        (f"/machine.slice/libpod-conmon-{ID}.scope", None, None),
        (f"/docker/{'f' * 64}/docker/{ID}", ID, None),
        (f"/../../kubepods/pod{UID}/{ID}", ID, UID),
        ("/user.slice/user-1000.slice/session-3.scope", None, None),
        ("/", None, None),
    ],
)
def test_container_and_pod_by_the_form_of_the_path(path: str, container: str | None, pod: str | None) -> None:
    unified = membership(f"0::{path}\n")
    assert (unified.container, unified.pod_uid, unified.path, unified.unified) == (container, pod, path, True)
    first = membership(f"5:cpu,cpuacct:/\n4:memory:{path}\n0::/\n")
    assert (first.container, first.pod_uid, first.path, first.unified) == (container, pod, path, False)


def test_a_container_that_only_another_controller_tells_counts() -> None:
    assert membership(f"4:memory:/\n1:name=systemd:/docker/{ID}\n").container == ID


def test_an_unreadable_file_tells_nothing() -> None:
    assert membership("") == Membership()


OWN = Membership(path="/oomwatch")


def _group(root: Path, path: str, **files: object) -> None:
    (root / path).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / path / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_smallest_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    _group(tmp_path, "a", memory__max=4000)
    _group(tmp_path, "a/b", memory__max="max")
    _group(tmp_path, "a/b/c", memory__max=9000)
    assert memory_limit(Membership(path="/a/b/c"), OWN, tmp_path) == 4000


def test_no_limit_is_none(tmp_path: Path) -> None:
    _group(tmp_path, "a", memory__max="max")
    assert memory_limit(Membership(path="/a"), OWN, tmp_path) is None


def test_version_1_has_a_hierarchy_of_its_own_and_a_huge_number_for_no_limit(tmp_path: Path) -> None:
    _group(tmp_path, "memory", memory__limit_in_bytes=V1_UNLIMITED)
    _group(tmp_path, "memory/a", memory__limit_in_bytes=5000)
    _group(tmp_path, "memory/a/b", memory__limit_in_bytes=V1_UNLIMITED)
    assert memory_limit(Membership(path="/a/b", unified=False), OWN, tmp_path) == 5000
    assert memory_limit(Membership(path="/", unified=False), OWN, tmp_path) is None


def test_the_limit_of_our_own_container_is_not_taken_for_anothers(tmp_path: Path) -> None:
    """In a container the mounted tree is that of this container: other containers' paths are not in it."""
    _group(tmp_path, "memory", memory__limit_in_bytes=5000)
    own = Membership(path="/docker/mine", unified=False)
    assert memory_limit(Membership(path="/docker/mine", unified=False), own, tmp_path) == 5000
    assert memory_limit(Membership(path="/docker/other", unified=False), own, tmp_path) is None


def test_a_path_outside_the_visible_tree_has_no_known_limit(tmp_path: Path) -> None:
    _group(tmp_path, ".", memory__max=5000)
    assert memory_limit(Membership(path="/../other"), OWN, tmp_path) is None
