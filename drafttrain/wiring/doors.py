"""Open a door: the command line of a function, its errors as one line, its exit codes.

The doors use Hydra's compose interface and not `@hydra.main`, so that nothing changes the working directory, makes folders or
configures logging.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain import runs
from drafttrain.errors import InputError, disk_full
from drafttrain.processes import rank, world_size
from drafttrain.wiring.composing import invocation_of
from drafttrain.wiring.usage import help_text

TRACEBACK_VARIABLE = "DRAFTTRAIN_TRACEBACK"


def door(name: str, *, text: Sequence[str] = ("prompt",)) -> Callable[[Callable[[DictConfig], Any]], Callable[..., Any]]:
    """Make a command of a function: `conf/<name>.yaml` composed with the command line, errors as one line, exit codes.

    The command takes `key=value` words, `--help`, `--cfg job` (print the configuration; `--resolve` to resolve references) and
    `--config-dir DIR` (one's own configurations). Exit codes: 0 done, 2 wrong input or disk full, 130 interrupted.

    Args:
        name: the primary configuration and the door's name.
        text: keys whose value is taken literally (a prompt may hold any character).
    """

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def command(argv: Sequence[str] | None = None) -> Any:
            words = list(sys.argv[1:] if argv is None else argv)
            before = runs.current
            try:
                options, overrides = _options_of(words)
                if options["help"]:
                    print(help_text(name, main, overrides, text, options["config_dir"]))
                    return None
                invocation = invocation_of(
                    name, overrides, text=text, config_dir=options["config_dir"], check_missing=not options["cfg"]
                )
                if options["cfg"]:
                    print(OmegaConf.to_yaml(invocation.config, resolve=options["resolve"]), end="")
                    return None
                runs.current = invocation
                return main(invocation.config)
            except KeyboardInterrupt:
                _complain(name, "interrupted")
                raise SystemExit(130) from None
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(1) from None
            except Exception as error:
                message = str(error) if isinstance(error, InputError) else disk_full(error)
                if not message:
                    raise
                if os.environ.get(TRACEBACK_VARIABLE, "0") != "0" or os.environ.get("HYDRA_FULL_ERROR", "0") != "0":
                    traceback.print_exc()
                _complain(name, message)
                raise SystemExit(2) from None
            finally:
                runs.current = before

        return command

    return decorate


def _complain(name: str, message: str) -> None:
    place = f" (rank {rank()})" if world_size() > 1 else ""
    print(f"drafttrain.{name}{place}: {message}", file=sys.stderr, flush=True)


def _options_of(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {"help": False, "cfg": False, "resolve": False, "config_dir": None}
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
                raise InputError(f"{flag} {kind}: only `--cfg job` is known; it prints the configuration")
            options["cfg"] = True
        elif flag in ("--config-dir", "-cd"):
            options["config_dir"] = value if equals else (queue.pop(0) if queue else "")
        elif word in ("--multirun", "-m"):
            raise InputError(f"{word}: one command makes one run; for a sweep, loop in the shell")
        elif word.startswith("-"):
            raise InputError(f"{word}: unknown option; settings are key=value, options are --help, --cfg job, --config-dir DIR")
        else:
            rest.append(word)
    return options, rest
