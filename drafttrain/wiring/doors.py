"""Open a door: the command line of a function, its errors as one line, its exit codes.

The doors use Hydra's compose interface and not `@hydra.main`, so that nothing changes the working
directory, makes folders or configures logging.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain import companions, masking, runs
from drafttrain.errors import InputError, LostCompanion, one_line, refused_by_system
from drafttrain.processes import check_variables, rank, world_size
from drafttrain.wiring.composing import invocation_of
from drafttrain.wiring.sweeps import Sweep, sweep_of
from drafttrain.wiring.usage import help_text

TRACEBACK_VARIABLE = "DRAFTTRAIN_TRACEBACK"
STOPPED_BY_SIGNAL = companions.STOPPED_BY_SIGNAL
"""Exit code after a TERM signal."""


class door:
    """A command: `conf/<name>.yaml` composed with the command line, errors as one line, exit codes.

    The command takes `key=value` words, `--help`, `--cfg job` (print the configuration; `--resolve`
    to resolve references) and `--config-dir DIR` (one's own configurations); where it sweeps, `-m`
    too, with words that name several values. Exit codes: 0 done, 1
    ended since another process of the run was lost, 2 wrong input, or a file, disk or memory that
    cannot be had, 130 interrupted, 143 stopped by a TERM signal.

    Args:
        name: the primary configuration and the door's name.
        text: keys whose value is taken literally (a prompt may hold any character).
        together: do its processes need each other to go on?
        check: refuses settings that are wrong by themselves; nothing that it needs imports torch.
        check_sweep: likewise for the runs of a sweep; None: the door makes one run for a command.
    """

    several: Callable[[Sweep], Any]
    """Does the work of a sweep, see `sweeps`."""

    def __init__(
        self,
        name: str,
        *,
        text: Sequence[str] = ("prompt",),
        together: bool = False,
        check: Callable[[DictConfig], Any] | None = None,
        check_sweep: Callable[[Sweep], Any] | None = None,
    ) -> None:
        self.name, self.text, self.together = name, text, together
        self.check, self.check_sweep = check, check_sweep

    def greet(self, about: str | None) -> None:
        """Answer `--help`, `--cfg` and wrong settings, and leave; return where there is work to do.

        Called before a door imports what does the work, since torch takes seconds to import.

        Args:
            about: the door's docstring.
        """
        with self._ended_in_words():
            invocation = self._asked(sys.argv[1:], about)
            if invocation is None:
                raise SystemExit(0)
            if isinstance(invocation, Sweep):
                assert self.check_sweep is not None
                self.check_sweep(invocation)
            elif self.check is not None:
                self.check(invocation.config)

    def sweeps(self, several: Callable[[Sweep], Any]) -> Callable[[Sweep], Any]:
        """Let a function do the work of a sweep."""
        self.several = several
        return several

    def __call__(self, main: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        """The command that does the work of a function."""

        @functools.wraps(main)
        def command(argv: Sequence[str] | None = None) -> Any:
            before = runs.current
            try:
                with self._ended_in_words():
                    words = list(sys.argv[1:] if argv is None else argv)
                    module = sys.modules.get(main.__module__)
                    about = (module.__doc__ if module else None) or main.__doc__
                    invocation = self._asked(words, about)
                    if invocation is None:
                        return None
                    if not self.together:
                        check_variables()
                    together = companions.together if self.together else contextlib.nullcontext
                    with together(self.name):
                        if isinstance(invocation, Sweep):
                            return self.several(invocation)
                        return main(invocation.config)
            finally:
                runs.current = before

        return command

    def _asked(self, words: list[str], about: str | None) -> runs.Invocation | Sweep | None:
        """What the words on the command line ask for; None where it was something to print."""
        options, overrides = _options_of(words)
        runs.current = runs.Invocation(self.name, tuple(overrides))  # Its refusals name no secrets.
        sweep = None
        if options["multirun"]:
            sweep = self._swept(options, overrides)
            runs.current = sweep.invocation
            overrides = list(sweep.first)
        if options["help"]:
            shown = help_text(
                self.name,
                about,
                overrides,
                self.text,
                options["config_dir"],
                sweeps=self.check_sweep is not None,
            )
            print(runs.hidden(shown))
            return None
        if sweep is not None:
            return sweep
        invocation = invocation_of(
            self.name,
            overrides,
            text=self.text,
            config_dir=options["config_dir"],
            check_missing=not options["cfg"],
        )
        runs.current = invocation
        if options["cfg"]:
            print(_shown(invocation.config, resolve=options["resolve"]), end="")
            return None
        return invocation

    def _swept(self, options: dict[str, Any], words: Sequence[str]) -> Sweep:
        """The sweep that words with -m ask for. Raises InputError where the door makes none."""
        given = options["multirun"]
        if self.check_sweep is None:
            raise InputError(
                f"{given}: one command of {self.name} makes one run, only fit sweeps: leave it "
                "out, and loop in the shell"
            )
        if options["cfg"]:
            raise InputError(
                f"{given} --cfg: a sweep has several configurations; leave {given} out, and give "
                "one value for each setting, to see the one of a run"
            )
        return sweep_of(
            self.name,
            words,
            text=self.text,
            config_dir=options["config_dir"],
            check_missing=not options["help"],
        )

    @contextlib.contextmanager
    def _ended_in_words(self) -> Iterator[None]:
        """What ends the command inside is said in one line, and gives its exit code."""
        with _ended_by_term():
            try:
                with _any_character():
                    yield
            except (KeyboardInterrupt, _Terminated, Exception) as error:
                code = _exit_code(self.name, error)
                if code is None:
                    sys.excepthook = functools.partial(_show_fault, runs.current.secrets)
                    raise
                raise SystemExit(code) from None


def _exit_code(name: str, error: BaseException) -> int | None:
    """Print an error as one line. Returns the exit code; None for a fault of this program."""
    if isinstance(error, KeyboardInterrupt):
        _complain(name, "interrupted")
        return 130
    if isinstance(error, _Terminated):
        _complain(name, "stopped by a signal")
        return STOPPED_BY_SIGNAL
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, LostCompanion):
        _complain(name, str(error))
        return 1
    message = str(error) if isinstance(error, InputError) else refused_by_system(error)
    if not message:
        return None
    if any(os.environ.get(name, "0") != "0" for name in (TRACEBACK_VARIABLE, "HYDRA_FULL_ERROR")):
        print(runs.hidden(traceback.format_exc()), end="", file=sys.stderr)
    _complain(name, message)
    return 2


def _shown(config: DictConfig, *, resolve: bool) -> str:
    """A configuration as YAML, without secrets."""
    values = OmegaConf.to_container(config, resolve=resolve)
    return OmegaConf.to_yaml(OmegaConf.create(runs.masked(values)))


def _show_fault(secrets: Collection[str], *error: Any) -> None:
    """Python's own traceback, without secrets."""
    text = "".join(traceback.format_exception(*error))
    print(masking.hidden(text, secrets), end="", file=sys.stderr)


class _Terminated(BaseException):
    """A TERM signal came."""


@contextlib.contextmanager
def _ended_by_term() -> Iterator[None]:
    """A TERM signal ends what runs inside as an error would, so that it tidies up."""

    def end(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second one must not disturb the tidying.
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:  # It came while another error was being reported.
        raise SystemExit(STOPPED_BY_SIGNAL) from None
    finally:
        if before is not None:  # One that was not set by Python stays.
            signal.signal(signal.SIGTERM, before)  # Also where it was ignored meanwhile.


@contextlib.contextmanager
def _any_character() -> Iterator[None]:
    """Characters that standard output's encoding lacks are written as escapes: a model may write
    any."""
    stream: Any = sys.stdout
    strict = getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure")
    if strict:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if strict:
            with contextlib.suppress(ValueError):  # closed meanwhile
                stream.reconfigure(errors="strict")


def _complain(name: str, message: str) -> None:
    place = f" (rank {rank()})" if world_size() > 1 else ""
    line = one_line(runs.hidden(message)).strip()
    print(f"drafttrain.{name}{place}: {line}", file=sys.stderr, flush=True)


def _options_of(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {"help": False, "cfg": False, "resolve": False, "config_dir": None}
    options["multirun"] = ""
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            options["help"] = True
        elif word == "--resolve":
            options["resolve"] = True
        elif flag in ("--cfg", "-c"):
            kind = value if equals else (queue.pop(0) if queue else "")
            if kind != "job":
                raise InputError(
                    f"{flag} {kind}: only `--cfg job` is known; it prints the configuration"
                )
            options["cfg"] = True
        elif flag in ("--config-dir", "-cd"):
            folder = value if equals else (queue.pop(0) if queue else "")
            if not folder:
                raise InputError(f"{flag} needs a folder: {flag} <folder>")
            options["config_dir"] = folder
        elif word in ("--multirun", "-m"):
            options["multirun"] = word
        elif word.startswith("-"):
            raise InputError(
                f"{word}: unknown option; settings are key=value, options are --help, --cfg job, "
                "--config-dir DIR"
            )
        else:
            rest.append(word)
    return options, rest
