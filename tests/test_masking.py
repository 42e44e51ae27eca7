"""Secrets among settings are found by their names, and neither kept nor shown."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafttrain import fit, masking, runs
from drafttrain.masking import hidden_lines, looks_secret
from drafttrain.reporting import loggers
from drafttrain.runs import Invocation, hidden, kept, masked
from drafttrain.wiring.conf import conf_dir

# --- F92: secrets ---------------------------------------------------------------------------------
# The kind: a setting whose name says that it is a secret, in any spelling and at any depth, alone,
# in a list or in a section of that name; a number; a user in an address; a parameter of an address;
# a variable of the environment, by name or by where it is read, its default included; a reference
# to any of these. Each in what is kept (plain, YAML), in the command, on the console (`--cfg job`,
# `--help`), in refusals before and after the configuration is composed, and in faults of others
# that quote it.
# Neighbours that are none: counts (`batch_tokens`), tokens of text (`mask_token`), switches, null.

SECRETS = {"hunter2!", "tok-123456", "7654321098", "pa55word", "from-outside", "by-default"}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SOME_API_KEY", "from-outside")
    monkeypatch.setenv("SOME_PLACE", "somewhere")
    return {
        "logger": {
            "_target_": "mine.logger",
            "token": "tok-123456",
            "apiKey": "${oc.env:SOME_API_KEY}",
            "key": "${oc.env:NO_SUCH_KEY,by-default}",
            "again": "${logger.apiKey}",
            "header": "Bearer ${oc.env:SOME_API_KEY}",
            "innocent": "${oc.env:SOME_API_KEY,by-default}",
            "db_passwords": None,
            "credentials": {"user": "me", "all": ["hunter2!", 7654321098]},
            "address": "https://me:pa55word@host/x?access_token=hunter2!&a=1",
            "auth": True,
            "place": "${oc.env:SOME_PLACE}/x",
        },
        "trainer": {"batch_tokens": 2048, "mask_token": "<mask>", "again": "${.batch_tokens}"},
    }


@pytest.fixture
def door(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Invocation:
    """It has been opened with these settings."""
    given = ("logger.token=tok-123456", "+logger={_target_: x, api_key: hunter2!}", "seed=1")
    found = Invocation("fit", given, {}, OmegaConf.create(config))
    monkeypatch.setattr(runs, "current", found)
    return found


def clean(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@pytest.mark.field("F92")
def test_nothing_that_is_kept_holds_a_secret(config: dict[str, Any], door: Invocation) -> None:
    found = kept(config)
    assert clean(str(found)) and "somewhere" not in str(found), found
    assert found["trainer"] == {"batch_tokens": 2048, "mask_token": "<mask>", "again": 2048}
    assert found["logger"] == {
        "_target_": "mine.logger",
        "token": "***",
        "apiKey": "${oc.env:SOME_API_KEY}",
        "key": "${oc.env:NO_SUCH_KEY,***}",
        "again": "${oc.env:SOME_API_KEY}",
        "header": "Bearer ${oc.env:SOME_API_KEY}",
        "innocent": "${oc.env:SOME_API_KEY,***}",
        "db_passwords": None,
        "credentials": {"user": "***", "all": ["***", "***"]},
        "address": "https://***@host/x?access_token=***&a=1",
        "auth": True,
        "place": "${oc.env:SOME_PLACE}/x",
    }
    assert clean(door.command) and "seed=1" in door.command
    made = runs.provenance()
    assert made["config"] == found and made["command"] == door.command
    # Values that were resolved already: facts of a run, what processes compare.
    resolved = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    assert clean(str(masked(resolved))), masked(resolved)
    assert masked(found) == found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("401 for url: https://me:p@ss@host/x", "401 for url: https://***@host/x"),
        ("clone https://tok-123456@host", "clone https://***@host"),
        ("the server refused tok-123456", "the server refused ***"),
        ("refused 'logger.token=abc'", "refused 'logger.token=***'"),
        ('refused password="a b", try', "refused password=***, try"),
        ("settings are written key=value", "settings are written key=value"),
        ("give token=<yours> or token=...", "give token=<yours> or token=..."),
        ("trainer.batch_tokens=12 at a@b.c", "trainer.batch_tokens=12 at a@b.c"),
        ("+logger.url=https://h/x?token=abc&a=1", "+logger.url=https://h/x?token=***&a=1"),
        ("logger.opts='api_key=abc other=1'", "logger.opts='api_key=*** other=1'"),
        ("logger.token=${oc.env:X}", "logger.token=${oc.env:X}"),
        # A part of a path is no value of a secret, what an address asks for is.
        ("data.path=/data/key=2024/a.jsonl", "data.path=/data/key=2024/a.jsonl"),
        ("'/my data/token=abc/key=7' is empty", "'/my data/token=abc/key=7' is empty"),
        ("data.path=key=2024-01-31/a.jsonl", "data.path=key=2024-01-31/a.jsonl"),
        ("data.path=in/key=abc/a.jsonl", "data.path=in/key=abc/a.jsonl"),
        ("data.path=~/key=abc out=./key=abc", "data.path=~/key=abc out=./key=abc"),
        (r"data.path=C:\x\key=abc", r"data.path=C:\x\key=abc"),
        ("s3://b/key=2024/a.parquet", "s3://b/key=2024/a.parquet"),
        ("https://h/x/key=abc", "https://h/x/key=***"),
        ("https://h/x?a=/b/key=2024/c", "https://h/x?a=/b/key=***"),
        ("logger/x.token=abc", "logger/x.token=***"),
        (
            "https://h/x?sig=a%2Fb&X-Amz-Signature=c&n=1",
            "https://h/x?sig=***&X-Amz-Signature=***&n=1",
        ),
        ("https://h/x?pat=ab;jwt=c d", "https://h/x?pat=***;jwt=*** d"),
        ("api_key=key=abc x", "api_key=*** x"),
    ],
)
def test_texts_that_quote_a_secret(text: str, shown: str, door: Invocation) -> None:
    assert hidden(text) == shown


# A secret that is a plain word or a number is masked where it is a value, and left in longer names;
# a short one is only found by its setting's name. Tried: names of classes, modules, paths, numbers.


@pytest.mark.parametrize(
    ("secret", "text", "shown"),
    [
        ("drafttrain", "_target_: drafttrain.fit.x", "_target_: drafttrain.fit.x"),
        ("drafttrain", "at /home/drafttrain/x-drafttrain", "at /home/drafttrain/x-drafttrain"),
        ("drafttrain", "refused drafttrain. Or 'drafttrain'", "refused ***. Or '***'"),
        ("20240131", "loss 0.20240131 in key/20240131/x", "loss 0.20240131 in key/20240131/x"),
        ("20240131", "refused 20240131", "refused ***"),
        ("tok-123456", "at https://h/tok-123456/x", "at https://h/***/x"),
        ("seed7", "seed7 of logger.token=seed7", "seed7 of logger.token=***"),
    ],
)
def test_secrets_that_are_words_are_masked_where_they_are_values(
    secret: str, text: str, shown: str
) -> None:
    word = f"+logger.token={secret}"
    config = OmegaConf.create({"logger": {"token": secret}})
    found = Invocation("fit", (word,), {}, config)
    assert masking.hidden(text, found.secrets) == shown
    assert found.command == "python -m drafttrain.fit '+logger.token=***'"
    assert masking.masked({"x": text}, found.secrets) == {"x": shown}


def test_a_part_of_a_path_is_not_looked_for_in_texts() -> None:
    words = ["data.path=/data/key=20240101/token=abcdef-1/x", "out=in/key=abcdef-2/y"]
    assert list(masking.secrets_among(words)) == []
    given = ["+a={url:'https://h/x?token=abcdef-3&a=1',b:{key: abcdef-4}}", "logger/token=abcdef-5"]
    found = set(masking.secrets_among(given))
    assert {"abcdef-3", "abcdef-4", "abcdef-5"} <= found


def test_a_page_of_an_earlier_version_shows_no_secrets() -> None:
    text = "logger:\n  token: abc\n  key: ${oc.env:A}\n  - secret: 'x y'\ntrainer:\n  seed: 1\n"
    assert hidden_lines(text) == (
        "logger:\n  token: ***\n  key: ${oc.env:A}\n  - secret: ***\ntrainer:\n  seed: 1\n"
    )


def test_no_setting_of_this_program_is_taken_for_a_secret() -> None:
    names = {
        name
        for path in conf_dir().rglob("*.yaml")
        for name in re.findall(r"(?m)^ *([\w-]+):", path.read_text(encoding="utf-8"))
    }
    assert len(names) > 100 and [name for name in names if looks_secret(name)] == []
    secret = "token HF_TOKEN apiKey APIKey dbPassword secrets oauth api_keys authtoken wandb-key"
    secret += " pass dbPass smtp_pass pw creds aws_creds pat GITHUB_PAT jwt sig sas_sig accesskey"
    secret += " access_key AWSAccessKeyId accesskeyid session session_id cookie bearer bearer_token"
    secret += " X-Amz-Signature passcode mypassword sessiontoken refreshtoken csrf webhook_url"
    plain = "tokens batch_tokens eos_token mask_token token_id author monkey keys tokenizer '' 1"
    plain += " path passes bypass pattern patience spwn sigma design credit possession pwm jwtx"
    plain += " signal passage compass obsession"
    assert all(map(looks_secret, secret.split())) and not any(map(looks_secret, plain.split()))


@pytest.mark.parametrize(
    "words",
    [
        ["+logger.token=tok-123456", "--cfg", "job"],
        ["+logger.token=tok-123456", "--cfg", "job", "--resolve"],
        ["+logger.key=${oc.env:SOME_API_KEY,by-default}", "--cfg", "job"],
        ["+logger.token=tok-123456", "--help"],
        ["+logger.token=tok-123456", "sed=1"],
        ["+loger.token=tok-123456"],
        ["+logger.token=pa55word, hunter2!"],
        ["+logger={api_key: hunter2!"],
        ["data.path=https://me:pa55word@host/x", "seed=-1"],
        ["+logger.token=tok-123456", "seed=tok-123456"],
    ],
)
def test_a_door_shows_no_secrets(
    words: list[str], config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = runs.current
    try:
        fit.main(words)
    except SystemExit as left:
        assert left.code == 2
    found = capsys.readouterr()
    shown = found.out + found.err
    assert shown and clean(shown), shown
    assert runs.current is before


def test_a_fault_of_another_program_shows_no_secrets(
    door: Invocation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(cfg: Any) -> None:
        raise KeyError("the server refused tok-123456")

    monkeypatch.setattr(sys, "excepthook", None)
    from drafttrain.wiring.doors import door as opened

    with pytest.raises(KeyError) as caught:
        opened("fit")(fail)(["+logger.token=tok-123456"])
    sys.excepthook(caught.type, caught.value, None)
    shown = capsys.readouterr().err
    assert "the server refused ***" in shown and clean(shown)


def test_a_tracker_is_not_sent_the_words_of_the_command(
    door: Invocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb reads them by itself."""
    sent: list[str] = []

    @dataclasses.dataclass
    class Fake:
        settings: Any

        def __init__(self, **given: Any) -> None:
            pass

        @property
        def experiment(self) -> None:
            sent.extend(sys.argv)

    words = ["fit.py", "logger.token=tok-123456", "logger.address=https://me:pa55word@host"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(loggers, "WandbLogger", Fake)
    loggers.wandb_loggers(tmp_path, project="p", mode="offline")
    assert sent == ["fit.py", "logger.token=***", "logger.address=https://***@host"]
    assert sys.argv is words
