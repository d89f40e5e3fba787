"""A real vLLM server on the CPU for a test, with a pool small enough to fill, and bounded load for it."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.model import BYTE_TOKENS, FIRST_BYTE_TOKEN, ensure_tiny_model
from tests.e2e.processes import ServerProcess, free_port, patient_get, wait_until
from tests.e2e.vllm_setup import VllmVenv

MODEL_NAME = "tiny"
GROUP_NICE = 10  # of a server's session
HANG_TRIES = 5
START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 120.0
POOL_BLOCKS = 33
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 512

# The CPU attention takes blocks of 32 tokens and refuses 16; eager mode starts in half the time.
POOL_ARGUMENTS = (
    "--dtype=bfloat16",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--enforce-eager",
    f"--block-size={BLOCK_TOKENS}",
    f"--num-gpu-blocks-override={POOL_BLOCKS}",
)
CPU_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class Role(enum.Enum):
    """What a process of the server is, told by the title that vLLM gives it.

    The main process serves the API itself, unless it was told to start several API servers.
    """

    MAIN = "main"
    API_SERVER = "api server"
    ENGINE_CORE = "engine core"
    WORKER = "worker"
    OTHER = "other"


@dataclass(frozen=True)
class EngineProcess:
    pid: int
    role: Role
    title: str
    rss_bytes: int


@dataclass(frozen=True)
class Completion:
    """How one request went: `status` is the HTTP status, None when no answer came; `error` is empty on success."""

    status: int | None
    completion_tokens: int
    seconds: float
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return self.status == HTTPStatus.OK


_TITLES = {
    "VLLM::APIServer": Role.API_SERVER,
    "VLLM::EngineCore": Role.ENGINE_CORE,
    "VLLM::Worker": Role.WORKER,
}


class Load:
    """Requests on their way. Each ends by itself after its timeout at the latest."""

    def __init__(self, futures: Sequence[Future[Completion]]) -> None:
        self._futures = futures

    @property
    def finished(self) -> bool:
        return all(future.done() for future in self._futures)

    def results(self, timeout_s: float = REQUEST_TIMEOUT_S) -> list[Completion]:
        """All results in the order of the requests; raises TimeoutError when some are still open after `timeout_s`."""
        _, still_open = wait(self._futures, timeout=timeout_s)
        if still_open:
            raise TimeoutError(f"{len(still_open)} of {len(self._futures)} requests still open after {timeout_s:g} s")
        return [future.result() for future in self._futures]


class VllmEngine(ServerProcess):
    """`vllm serve` with the tiny model on a free port of 127.0.0.1; log, plugins, temporary files lie in `folder`.

    `arguments` are added to the command line, where they win over POOL_ARGUMENTS; `environment` is added to this
    process's; `plugins` are Python files with a function `register` that vLLM calls in each of its processes;
    `python_path` are folders in front of its import path.
    """

    def __init__(
        self,
        venv: VllmVenv,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        plugins: Sequence[Path] = (),
        python_path: Sequence[Path] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.metrics_url = f"{self.url}/metrics"
        self._request_number = itertools.count()
        temporary = folder / "tmp"
        temporary.mkdir()
        plugin_folder = folder / "plugins"
        for plugin in plugins:
            install_general_plugin(plugin, plugin_folder)
        import_path = [str(path.absolute()) for path in (*python_path, plugin_folder)]
        super().__init__(
            [
                venv.vllm,
                "serve",
                ensure_tiny_model(venv.models / MODEL_NAME),
                f"--served-model-name={MODEL_NAME}",
                "--host=127.0.0.1",
                f"--port={self.port}",
                *POOL_ARGUMENTS,
                *arguments,
            ],
            log_path=folder / "vllm.log",
            ready_url=f"{self.url}/health",
            start_timeout_s=start_timeout_s,
            environment={
                **os.environ,
                **CPU_ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(import_path),
                "TMPDIR": str(temporary),
                "VLLM_CACHE_ROOT": str(venv.cache),
                **(environment or {}),
            },
            stop_signal=signal.SIGINT,
        )

    def start(self) -> None:
        """Starts the server, which comes after the programs around it from then on.

        Under Linux 6.18.44 its processes, which wait by looking again and again, left the daemon and the clients on two
        processors without any for 6 s at a time. One that could keep every processor busy leaves one to them.
        """
        super().start()
        with contextlib.suppress(OSError):  # a kernel without groups of a session each
            Path(f"/proc/{self.pid}/autogroup").write_text(str(GROUP_NICE), encoding="ascii")
        processors = os.sched_getaffinity(0)
        if len(self._with_role(Role.WORKER)) >= len(processors) > 1:
            self.run_on(processors - {max(processors)})

    def processes(self) -> list[EngineProcess]:
        """The server's living processes, oldest first."""
        found = []
        for process in self.session():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()).strip()
                role = Role.MAIN if process.pid == self.pid else _role(title)
                found.append(EngineProcess(process.pid, role, title, process.memory_info().rss))
        return found

    def scrape(self) -> str:
        """The body of /metrics. Raises requests.RequestException when the server does not answer 200."""
        answer = patient_get(self.metrics_url)
        answer.raise_for_status()
        return answer.text

    def metric(self, sample_name: str, **labels: str) -> float | None:
        """The value of the one sample with this name and these labels (others may be there too); None without any."""
        values = list(_values(self.scrape(), sample_name, labels))
        if len(values) > 1:
            raise ValueError(f"{len(values)} samples are called {sample_name} with labels {labels}")
        return values[0] if values else None

    def wait_until_requests_run(self, rank: int = 0) -> None:
        """Asks the server itself, for a load may be over when the daemon has seen it."""
        wait_until(
            lambda: (self.metric("vllm:num_requests_running", engine=str(rank)) or 0) > 0,
            30,
            f"rank {rank} works",
            interval_s=0.02,
        )

    def hang_under_load(self, rank: int = 0) -> Load:
        """Hangs the model's process of a rank (SIGSTOP) while it works, and returns the load that waits for it.

        The machine may keep this program waiting until all was served: then it is tried again.
        """
        for _ in range(HANG_TRIES):
            load = self.start_load(8, concurrency=4, rank=rank)
            self.wait_until_requests_run(rank)
            self.sigstop_worker(rank)
            if self._stands_still(rank) and not load.finished:
                return load
            self.sigcont_worker(rank)
            load.results()
        raise RuntimeError(f"{HANG_TRIES} loads were served before the server could be stopped")

    def _stands_still(self, rank: int) -> bool:
        """Whether requests run by its page, once no more tokens come out."""
        before: float | None = -1.0
        while (tokens := self.metric("vllm:generation_tokens_total", engine=str(rank))) != before:
            before = tokens
        return (self.metric("vllm:num_requests_running", engine=str(rank)) or 0) > 0

    def says_healthy(self) -> bool:
        return patient_get(f"{self.url}/health").status_code == HTTPStatus.OK

    def start_load(
        self,
        n: int,
        *,
        concurrency: int | None = None,
        prompt_tokens: int = 62,
        max_tokens: int = 300,
        ignore_eos: bool = True,
        timeout_s: float = REQUEST_TIMEOUT_S,
        rank: int | None = None,
    ) -> Load:
        """Sends `n` completions, `concurrency` (default: all) at a time, each with a prompt of its own, and returns.

        `rank` names the data-parallel rank that is to serve them, in place of the server's choice.
        """
        pool = ThreadPoolExecutor(concurrency or n, thread_name_prefix="load")
        request = (prompt_tokens, max_tokens, ignore_eos, timeout_s, rank)
        futures = [pool.submit(self._complete, *request) for _ in range(n)]
        pool.shutdown(wait=False)
        return Load(futures)

    def complete(
        self,
        n: int,
        *,
        concurrency: int | None = None,
        prompt_tokens: int = 62,
        max_tokens: int = 300,
        ignore_eos: bool = True,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> list[Completion]:
        """Like `start_load`, but waits for the results."""
        load = self.start_load(
            n,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            timeout_s=timeout_s,
        )
        return load.results(timeout_s * n)

    def stream_and_disconnect(self, n: int, *, prompt_tokens: int = 62, max_tokens: int = 300) -> int:
        """Opens `n` streams, hangs up on each after its first bytes; returns how many had bytes to hang up on."""
        with ThreadPoolExecutor(n, thread_name_prefix="stream") as pool:
            return sum(pool.map(lambda _: self._stream_first_bytes(prompt_tokens, max_tokens), range(n)))

    def sigstop_worker(self, rank: int = 0) -> int:
        """Hangs the model's process of one data-parallel rank (SIGSTOP); returns its pid."""
        return self._signal(self._worker(rank), signal.SIGSTOP)

    def sigcont_worker(self, rank: int = 0) -> int:
        return self._signal(self._worker(rank), signal.SIGCONT)

    def kill_worker(self, rank: int = 0) -> int:
        """Kills the model's process as the kernel's OOM killer would (SIGKILL); returns its pid."""
        return self._signal(self._worker(rank), signal.SIGKILL)

    def kill_engine_core(self, rank: int = 0) -> int:
        """Kills the scheduler process of one data-parallel rank (SIGKILL); returns its pid."""
        return self._signal(self._core(rank), signal.SIGKILL)

    def _complete(
        self, prompt_tokens: int, max_tokens: int, ignore_eos: bool, timeout_s: float, rank: int | None
    ) -> Completion:
        body = {**self._request(prompt_tokens, max_tokens), "ignore_eos": ignore_eos}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        started = time.monotonic()
        try:
            answer = requests.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=timeout_s)
            elapsed = time.monotonic() - started
            if answer.status_code != HTTPStatus.OK:
                return Completion(answer.status_code, 0, elapsed, answer.text)
            return Completion(answer.status_code, int(answer.json()["usage"]["completion_tokens"]), elapsed)
        except requests.RequestException as error:
            return Completion(None, 0, time.monotonic() - started, str(error))

    def _stream_first_bytes(self, prompt_tokens: int, max_tokens: int) -> bool:
        body = {**self._request(prompt_tokens, max_tokens), "ignore_eos": True, "stream": True}
        with requests.post(f"{self.url}/v1/completions", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as answer:
            return any(answer.iter_content(chunk_size=1))

    def _request(self, prompt_tokens: int, max_tokens: int) -> dict[str, object]:
        """A prompt of token ids that no other request shares, so that prefix caching cannot shrink the load."""
        source = random.Random(next(self._request_number))
        prompt = [FIRST_BYTE_TOKEN + source.randrange(BYTE_TOKENS) for _ in range(prompt_tokens)]
        return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}

    def run_on(self, processors: Set[int]) -> None:
        """Keeps all of the server's threads on some processors from now on."""
        for process in self.session():
            with contextlib.suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, processors)

    def _with_role(self, role: Role) -> list[EngineProcess]:
        return [process for process in self.processes() if process.role is role]

    def _core(self, rank: int) -> EngineProcess:
        return sorted(self._with_role(Role.ENGINE_CORE), key=lambda process: process.title)[rank]

    def _worker(self, rank: int) -> EngineProcess:
        core = self._core(rank)
        (worker,) = (p for p in self._with_role(Role.WORKER) if psutil.Process(p.pid).ppid() == core.pid)
        return worker

    def _signal(self, process: EngineProcess, number: signal.Signals) -> int:
        os.kill(process.pid, number)
        return process.pid


def install_general_plugin(source: Path, folder: Path) -> None:
    """Makes the Python file with its function `register` a general plugin for any vLLM with `folder` on its path."""
    metadata = folder / f"{source.stem}-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(source, folder)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {source.stem}\nVersion: 1.0\n", encoding="utf-8")
    entry_point = f"[vllm.general_plugins]\n{source.stem} = {source.stem}:register\n"
    (metadata / "entry_points.txt").write_text(entry_point, encoding="utf-8")


def _role(title: str) -> Role:
    for beginning, role in _TITLES.items():
        if title.startswith(beginning):
            return role
    return Role.OTHER


def _values(page: str, sample_name: str, labels: Mapping[str, str]) -> Iterator[float]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == sample_name and labels.items() <= sample.labels.items():
                yield float(sample.value)
