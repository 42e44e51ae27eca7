"""A run with secrets among its settings keeps none of them, and goes on with others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger

from drafttrain import fit
from drafttrain.reporting.loggers import CsvLogger
from drafttrain.training.checkpoint import read_checkpoint, write_checkpoint
from tests.fitting.parts import UNMEASURED, words

SENT: list[Mapping[str, Any]] = []
GIVEN: list[tuple[str, str, str]] = []
NAME = "tests.fitting.test_secrets.tracked"


class Tracker(CsvLogger):
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        SENT.append(params)


def tracked(run_dir: Path, *, token: str, url: str, place: str) -> list[Logger]:
    """A logger of the user's own."""
    GIVEN.append((token, url, place))
    return [Tracker(run_dir)]


@pytest.mark.field("F92")
def test_a_run_keeps_no_secrets_and_goes_on_with_others(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tracker works with them; config.yaml, checkpoints, package, page and tracker do not hold
    them. With another token it is still the same run, also where the checkpoint of an earlier
    version holds one."""
    monkeypatch.setenv("OWN_PLACE", "from-outside")
    SENT.clear()
    GIVEN.clear()
    run = tmp_path / "run"

    def started(token: str, steps: int, *more: str) -> None:
        own = [
            f"logger._target_={NAME}",
            f"+logger.token={token}",
            f"+logger.url='https://me:{token}@host/x'",
            "+logger.place=${oc.env:OWN_PLACE}",
            "optim.schedule=constant",
        ]
        fit.main(words(folder, run, *UNMEASURED, *own, f"trainer.max_steps={steps}", *more))

    started("tok-123456", 1)
    assert GIVEN == [("tok-123456", "https://me:tok-123456@host/x", "from-outside")]
    kept = {"token": "***", "url": "https://***@host/x", "place": "${oc.env:OWN_PLACE}"}
    (sent,) = SENT
    last = run / "checkpoints" / "last.ckpt"
    state = read_checkpoint(last)
    for settings in (sent, state["settings"]):
        assert settings["logger"] == {"_target_": NAME, **kept}
    state["settings"]["logger"]["token"] = "tok-123456"
    write_checkpoint(last, state)
    started("another-1", 2, "resume=last")
    assert len(GIVEN) == 2 and read_checkpoint(last)["progress"]["updates"] == 2
    said = capsys.readouterr()
    held = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert len(held) > 8
    for text in (*held, (said.out + said.err).encode()):
        for secret in (b"tok-123456", b"another-1", b"from-outside"):
            assert secret not in text
