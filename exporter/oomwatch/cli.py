"""The commands. Flags are spelled as Prometheus' exporters spell theirs."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import structlog

from oomwatch import __version__, logs
from oomwatch.backtest import backtest
from oomwatch.check import exit_status, read_once, report
from oomwatch.commands import Commands, config_file_option, configuration, fail, seconds, tell
from oomwatch.config import Config, check_files, effective, load, load_with_places
from oomwatch.connections import CannotListen
from oomwatch.daemon import Daemon
from oomwatch.demo import SETTINGS, STORIES, TOUR, DemoFeed
from oomwatch.diagnose.command import command as diagnose_command
from oomwatch.feed import Feed, NodeFeed
from oomwatch.notify import send_test
from oomwatch.past import Past, PrometheusServer
from oomwatch.pipeline import Pipeline
from oomwatch.plan.command import command as plan_command
from oomwatch.record import PATIENT, destination, parts, tap
from oomwatch.recording import read as read_recording
from oomwatch.recording import unix_time
from oomwatch.replay import FORMS
from oomwatch.replay import replay as run_replay
from oomwatch.settings import ConfigError, parse_duration

_log = structlog.get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def _log_options(command: F) -> F:
    level = click.option("--log.level", "log_level", metavar="LEVEL", help="debug, info, warn or error.")
    form = click.option("--log.format", "log_format", metavar="FORMAT", help="console (for people) or json.")
    return level(form(command))


def _web_options(command: F) -> F:
    options = (
        click.option(
            "--web.listen-address",
            "listen_address",
            multiple=True,
            metavar="HOST:PORT",
            help="Where to serve pages; :PORT is every interface. May be given several times.",
        ),
        click.option(
            "--web.config.file",
            "web_config_file",
            metavar="FILE",
            help="TLS and passwords for the pages, in the form of Prometheus' exporter toolkit.",
        ),
        click.option(
            "--web.enable-lifecycle/--no-web.enable-lifecycle",
            "enable_lifecycle",
            default=None,
            help="Serve POST /-/reload and /-/release.",
        ),
        click.option("--web.max-requests", "max_requests", metavar="N", help="Requests served at the same time."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _flags(given: dict[str, Any]) -> dict[str, object]:
    """Flags by the names that the configuration knows them under."""
    names = {
        "listen_address": "web.listen-address",
        "web_config_file": "web.config.file",
        "enable_lifecycle": "web.enable-lifecycle",
        "max_requests": "web.max-requests",
        "log_level": "log.level",
        "log_format": "log.format",
    }
    return {names[key]: value for key, value in given.items() if value is not None}


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oomwatch")
def main() -> None:
    """Watch the GPUs and the vLLM engines of this node, and tell before memory runs out.

    \b
    oomwatch check    what is there now, as a table
    oomwatch run      the daemon: pages for people, /metrics for Prometheus
    oomwatch record   save what the daemon has observed
    oomwatch replay   what the daemon would have said of a recording
    oomwatch diagnose what happened to an engine's memory, from its log or from what the daemon observed
    oomwatch plan     before a start: whether an engine will fit, and how many tokens its cache will hold
    oomwatch demo     a simulated node with the story of each killer; needs no GPU

    Without any configuration the GPUs are read through the NVIDIA driver, and the vLLM servers of this host are found
    by themselves. Each setting can stand in a YAML file (--config.file), in an environment variable (OOMWATCH_…), or,
    for the most used ones, in a flag; the later of these wins.
    """


main.add_command(plan_command)
main.add_command(diagnose_command)


@main.command()
@config_file_option
@_web_options
@_log_options
def run(config_file: Path | None, **given: Any) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    SIGHUP reads the configuration again. SIGUSR1 gives the driver's handles back, so that MIG can be reconfigured or
    the driver unloaded; a second SIGUSR1 takes them back at once, and nvml.release_for by itself.
    """

    def make_feed(config: Config, pipeline: Pipeline) -> Feed:
        return NodeFeed(config, pipeline.publish, lambda: pipeline.current)

    _serve(config_file, _flags(given), make_feed, keep_history=True)


@main.command()
@config_file_option
@_web_options
@_log_options
@click.option(
    "--story",
    type=click.Choice([TOUR, *STORIES]),
    default=TOUR,
    show_default=True,
    help="What happens: " + "; ".join(f"{name}: {text}" for name, text in STORIES.items()) + ".",
)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same story.")
@click.option("--speed", type=click.FloatRange(0.1, 20), default=1.0, show_default=True, help="Times faster.")
@click.option(
    "--interval", type=click.FloatRange(1, 60), default=5.0, show_default=True, help="Seconds between two readings."
)
def demo(config_file: Path | None, story: str, seed: int, speed: float, interval: float, **given: Any) -> None:
    """Run the daemon on a simulated node: GPUs, engines with traffic, and the story of each killer.

    Everything after the sources is the real thing, so Prometheus, Grafana and alerts can watch it. Each story takes
    ten minutes at most; the tour tells all of them, one after another. What killers do in hours they do in minutes
    here, and the thresholds that wait for quarters of an hour wait for seconds, unless the configuration sets them.
    """

    def make_feed(config: Config, pipeline: Pipeline) -> Feed:
        return DemoFeed(config, pipeline.publish, story=story, seed=seed, speed=speed)

    pace = {f"OOMWATCH_INTERVALS__{name}": str(interval) for name in ("GPU", "PROCESSES", "SCRAPE", "HOST")}
    _serve(config_file, _flags(given), make_feed, pace, SETTINGS)


@main.command()
@config_file_option
@_log_options
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--wait",
    type=click.FloatRange(0, 60),
    default=0.0,
    help="Read again after so many seconds; only two readings show progress.",
)
def check(config_file: Path | None, form: str, wait: float, **given: Any) -> None:
    """Read the GPUs and engines once and print what is there.

    \b
    Exit status: 0 all is well
                 1 something needs a look
                 2 something is broken, or the configuration cannot be used

    A node without a GPU or without an engine is not a fault: the table says so.
    """
    config = _loaded(config_file, {"log.level": "error", **_flags(given)})
    snapshot = read_once(config, wait)
    click.echo(report(snapshot, form))
    sys.stdout.flush()
    # A driver call that never returns may hold a thread; nothing is left to do, so nobody waits for it.
    os._exit(exit_status(snapshot))


@main.command()
@click.argument("file", metavar="[FILE]", required=False)
@config_file_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--prometheus", metavar="URL", help="A Prometheus server that scrapes vLLM, in place of FILE.")
@click.option(
    "--from", "since", metavar="TIME", help="Begin: 2026-11-01T00:00:00Z, a unix time, or 7d for so long ago."
)
@click.option("--to", "until", metavar="TIME", default="0s", help="End, in the same forms; now by default.")
@click.option("--engine", "engines", metavar="PATTERN", multiple=True, help="Only instances that fit, such as gpu-7:*.")
@click.option("--step", metavar="DURATION", help="Take values this far apart instead of every scrape.")
@click.option("--bearer-token-file", type=click.Path(), metavar="FILE", help="Token for the Prometheus server.")
@click.option("--username", metavar="NAME", help="User name for the Prometheus server.")
@click.option("--password-file", type=click.Path(), metavar="FILE", help="The user's password.")
@click.option("--ca-file", type=click.Path(), metavar="FILE", help="Certificates (PEM) to trust for https.")
def replay(
    file: str | None,
    config_file: Path | None,
    form: str,
    prometheus: str | None,
    since: str | None,
    until: str,
    engines: tuple[str, ...],
    step: str | None,
    bearer_token_file: str | None,
    username: str | None,
    password_file: str | None,
    ca_file: str | None,
) -> None:
    """Run the detectors over a recording, or over a Prometheus server's past, and print how the verdicts went.

    FILE is a recording as oomwatch record writes it, plain or gzip; - reads standard input. Thresholds come from the
    configuration. With --format json each change of a verdict's state is one JSON object on a line of its own, and the
    last line is the summary.

    With --prometheus the engines' own metrics of the past are read from the server, and a backtest comes behind: how
    often it would have alerted, what of it no restart followed, and how long before each restart it warned.

    \b
    Exit status: 0 everything was read to its end, whatever was found
                 2 it could not be, or the configuration cannot be used
    """
    config = configuration(config_file)
    if (file is None) == (prometheus is None):
        fail("give either a recording or --prometheus")
    if prometheus is None:
        with read_recording(file or "-") as recording:
            _print(FORMS[form](run_replay(recording, config), None))
        return
    options = replace(
        PATIENT,
        bearer_token_file=bearer_token_file,
        username=username,
        password_file=password_file,
        ca_file=ca_file,
    )
    now = time.time()
    past = Past(PrometheusServer(prometheus, options), step=_seconds("--step", step))
    begin, end = _moment("--from", since or "1d", now), _moment("--to", until, now)
    _print(FORMS[form](*backtest(past, begin, end, config, engines)))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def _moment(flag: str, given: str, now: float) -> float:
    """Unix time of a date, a unix time, or a duration before now."""
    try:
        back = parse_duration(given)
    except ValueError:
        try:
            return unix_time(given)
        except ValueError:
            fail(f"{flag} {given} is no time. Write one such as 2026-11-01T00:00:00Z, or 7d for so long ago")
    return back if back >= 1e9 else now - back


@main.command()
@config_file_option
@click.option("--output", metavar="FILE", help="Where to; packed where it ends in .gz, - is standard output.")
@click.option("--last", metavar="DURATION", help="How far back, such as 2h. By default everything there is.")
@click.option("--for", "follow", metavar="DURATION", help="How long to go on with what comes; alone, only that.")
@click.option("--url", metavar="URL", help="The daemon, where it isn't the one of this host's configuration.")
@click.option("--username", metavar="NAME", help="For a daemon that asks for a password.")
@click.option("--password-file", type=click.Path(), metavar="FILE", help="Holds the password and nothing else.")
@click.option("--ca-file", type=click.Path(), metavar="FILE", help="Certificates (PEM) to trust for https.")
@click.option("--include-log-text", is_flag=True, help="Also raw lines of logs, if history.log_text keeps them.")
def record(
    config_file: Path | None,
    output: str | None,
    last: str | None,
    follow: str | None,
    url: str | None,
    username: str | None,
    password_file: str | None,
    ca_file: str | None,
    include_log_text: bool,
) -> None:
    """Save what the daemon has observed, for oomwatch replay or a bug report.

    The running daemon is asked for its flight recorder, which covers its last 24 hours; nothing is polled a second
    time. When no daemon answers, its database is read. Nothing secret is in it: numbers, names, process titles.

    \b
    Exit status: 0 written
                 2 there is nothing to record from, or the file cannot be written
    """
    config = configuration(config_file)
    back, ahead = _seconds("--last", last), _seconds("--for", follow)
    options = replace(PATIENT, username=username, password_file=password_file, ca_file=ca_file)
    since = back if back is not None else 0.0 if ahead else config.history.keep
    name = output or f"oomwatch-{socket.gethostname()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.jsonl.gz"
    try:
        source, first = tap(config, since, url, options, log_text=include_log_text)
        with destination(name) as stream:
            for part in parts(source, first, ahead or 0.0):
                stream.write(part.lines)
    except OSError as error:
        fail(f"{name} cannot be written: {(error.strerror or str(error)).lower()}")
    if name != "-":
        click.echo(f"{name} written")


def _seconds(flag: str, given: str | None) -> float | None:
    return None if given is None else seconds(flag, given)


@main.group()
def alerts() -> None:
    """Alerts that the daemon sends by itself (alerting in the configuration)."""


@alerts.command("test")
@config_file_option
@click.option(
    "--severity",
    type=click.Choice(["warning", "critical"]),
    default="warning",
    show_default=True,
    help="critical goes where pages go, and may wake someone.",
)
@click.option("--lasts", metavar="DURATION", default="2m", show_default=True, help="Then Alertmanager resolves it.")
def alerts_test(config_file: Path | None, severity: str, lasts: str) -> None:
    """Send a clearly marked test, OomwatchTest, to every Alertmanager and webhook of the configuration.

    It takes the same way as an alert, with the same labels that say where, so that routes and receivers are tested.

    \b
    Exit status: 0 every target accepted it
                 1 one did not
                 2 none is configured, or the configuration cannot be used
    """
    config = configuration(config_file)
    if not (config.alerting.alertmanagers or config.alerting.webhooks):
        fail("alerting names no alertmanagers and no webhooks, so nobody would be told")
    good = True
    for name, text, accepted in send_test(config, severity, time.time(), seconds("--lasts", lasts) or 120.0):
        click.echo(f"{name}: {text}")
        good &= accepted
    sys.exit(0 if good else 1)


@main.group()
def config() -> None:
    """Look at the configuration without running anything."""


@config.command("check")
@config_file_option
def config_check(config_file: Path | None) -> None:
    """Print every mistake at once, with its place and what is allowed. Exit status 0 or 2."""
    loaded = load_with_places(config_file, os.environ, {})
    problems = check_files(loaded.config, loaded.places)
    if problems:
        raise ConfigError(problems)
    engines = len(loaded.config.engines)
    click.echo(f"{config_file or 'configuration'}: ok, {engines} engine{'' if engines == 1 else 's'} configured")


@config.command("show")
@config_file_option
@_web_options
@_log_options
def config_show(config_file: Path | None, **given: Any) -> None:
    """Print the configuration in force, defaults included, as YAML. Secrets are masked."""
    click.echo(effective(configuration(config_file, _flags(given))), nl=False)


def _serve(
    config_file: Path | None,
    flags: dict[str, object],
    make_feed: Callable[[Config, Pipeline], Feed],
    variables: dict[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    keep_history: bool = False,
) -> None:
    _loaded(config_file, flags)
    logs.log_uncaught()
    environment = {**(variables or {}), **os.environ}
    daemon = Daemon(lambda: load(config_file, environment, flags, defaults), make_feed, keep_history=keep_history)
    try:
        daemon.run()
    except CannotListen as error:
        tell(str(error))
        _leave(2)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End now. A thread inside a driver call that hangs cannot be ended, and must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread is not threading.main_thread() for thread in threading.enumerate()):
        os._exit(status)
    sys.exit(status)


def _loaded(config_file: Path | None, flags: dict[str, object]) -> Config:
    config = configuration(config_file, flags)
    logs.configure(config.log.level, config.log.format)
    return config


if __name__ == "__main__":
    main()
