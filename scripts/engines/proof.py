"""Serve exported packages with real engines, and compare text and accepted drafts with drafttrain's
own loop, count for count.

Usage:
    python scripts/engines/proof.py package ... [--venv DIR] [--prompts 8] [--new 48] [--tokens 4]

vLLM runs in an environment of its own (scripts/engines/setup.sh), decodes greedily in float32 and
is given the settings that `export` prints. transformers runs here, with the draft model as
`assistant_model`. Each round of greedy decoding is a function of the text so far, so that two loops
which draft alike accept alike, in every round. What they count differs in three places, and
drafttrain's side is counted as the engine does:

* Which vocabulary is drafted from: in these engines the full one, also where the package has a
  reduced one, unless a map of it is in the export, as in EAGLE-3's.
* vLLM: the pass that reads the prompt is no round. A round at the end counts all that it accepted,
  also what the limit then cuts off, and always drafts in full. Here the text is decoded a round
  further, and the rounds that began below the limit are counted.
* transformers: the first round drafts before the target has read the prompt. Here that is a prompt
  without its last token, which is then forced. Drafts that the limit leaves no room for are made by
  neither, and a round without drafts is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.data.conversations import read_set
from drafttrain.data.datamodule import set_folder
from drafttrain.decoding.loop import Output, decode
from drafttrain.decoding.plan import Plan
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.export import check_pair, export_package
from drafttrain.layouts.directory import open_directory
from drafttrain.layouts.engines import HF, VLLM
from drafttrain.layouts.pairs import engines_of
from drafttrain.layouts.vocabulary import MAPS
from drafttrain.nn.sampling import Policy
from drafttrain.packaging.reading import load_drafter
from drafttrain.reporting.console import table
from drafttrain.target import load
from drafttrain.target.embedded import cache_dir
from drafttrain.target.model import Target
from drafttrain.tree.topology import Tree

HERE = Path(__file__).resolve().parent
READY = ".ready"
SECONDS = 900.0
"""After which an engine that does not answer is ended."""
Prompts = Sequence[Sequence[int]]


class EngineError(Exception):
    """An engine that did not answer, with the end of what it said."""


@dataclass(frozen=True)
class Counts:
    """Of all prompts together, in rounds that drafted something."""

    rounds: int
    drafted: int
    accepted: tuple[int, ...]
    """Rounds that accepted place 1, 2, ..."""


@dataclass(frozen=True)
class Job:
    """A target with prompts, and what plain decoding writes."""

    target: Target
    folder: Path
    """The target as a directory of transformers."""
    prompts: list[list[int]]
    new: int
    """Tokens of each answer; stop tokens do not end it."""
    texts: list[list[int]]

    @classmethod
    def of(cls, target: Target, folder: Path, prompts: Prompts, new: int) -> Job:
        plain, _ = decode(
            target, None, prompts, Plan(Tree.chain(0)), max_new_tokens=new, stop_ids=()
        )
        return cls(
            target,
            folder,
            [list(prompt) for prompt in prompts],
            new,
            [output.ids for output in plain],
        )

    def same(self, texts: Prompts) -> int:
        return sum(list(theirs) == ours for theirs, ours in zip(texts, self.texts, strict=True))


@dataclass(frozen=True)
class Result:
    """What an engine did with an export, next to drafttrain's own loop."""

    name: str
    engine: str
    prompts: int
    same: int
    """Answers that are plain decoding's, id for id."""
    theirs: Counts | None
    """The engine's; None for plain decoding."""
    ours: Counts | None
    unread: tuple[str, ...] = ()
    """Tensors of the file that the engine passed over."""

    @property
    def holds(self) -> bool:
        return self.same == self.prompts and self.theirs == self.ours and not self.unread

    def row(self) -> list[str]:
        def pair(theirs: object, ours: object) -> str:
            return f"{theirs}" if theirs == ours else f"{theirs} / {ours}"

        counts = ["", "", ""]
        if self.theirs is not None and self.ours is not None:
            fields = ("rounds", "drafted", "accepted")
            counts = [
                pair(self._shown(self.theirs, name), self._shown(self.ours, name))
                for name in fields
            ]
        return [
            self.name,
            self.engine,
            f"{self.same}/{self.prompts}",
            *counts,
            ", ".join(self.unread),
        ]

    @staticmethod
    def _shown(counts: Counts, name: str) -> str:
        value = getattr(counts, name)
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- counting -------------------------------------------------------------------------------------


def over_full_vocabulary(drafter: Drafter) -> Drafter:
    """A drafter in float32 that drafts from the full vocabulary, as engines do with its export."""
    if getattr(drafter, "draft_ids", None) is not None:
        full = type(drafter)(drafter.target, **{**drafter.settings(), "draft_ids": None})
        full.load_state_dict(
            {name: tensor for name, tensor in drafter.state_dict().items() if name != "draft_ids"}
        )
        drafter = full
    return drafter.at(torch.float32)


def as_vllm(job: Job, drafter: Drafter, depth: int) -> Counts:
    """What vLLM counts for a chain of this depth."""
    # As far beyond the limit as a round that begins below it can reach, so that nothing is cut from
    # it.
    limit = job.new + depth + 1
    plan = Plan(Tree.chain(depth))
    outputs, _ = decode(job.target, drafter, job.prompts, plan, max_new_tokens=limit, stop_ids=())
    return counted(outputs, job.new, depth)


def counted(outputs: Sequence[Output], limit: int, depth: int) -> Counts:
    """Rounds that began with fewer than `limit` tokens written, each with all that it accepted."""
    rounds, accepted = 0, [0] * depth
    for output in outputs:
        (written, _), *following = output.runs
        for emitted, kept in following:
            if written >= limit:
                break
            rounds += 1
            for place in range(kept):
                accepted[place] += 1
            written += emitted
    return Counts(rounds, rounds * depth, tuple(accepted))


class _Forced:
    """After a text of this length, only this token."""

    def __init__(self, length: int, token: int) -> None:
        self.length, self.token = length, token

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] != self.length:
            return scores
        made = torch.full_like(scores, -torch.inf)
        made[:, self.token] = 0.0
        return made


def as_transformers(job: Job, drafter: Drafter, depth: int) -> Counts:
    """What transformers does with `num_assistant_tokens` of this depth, constant, and without a
    threshold of confidence."""
    rounds = drafted = 0
    accepted = [0] * depth
    for prompt in job.prompts:
        *before, last = prompt
        policy = Policy(processors=(_Forced(len(before), last),))
        plan = Plan(Tree.chain(depth), policy)
        (output,), _ = decode(
            job.target, drafter, [before], plan, max_new_tokens=job.new + 1, stop_ids=()
        )
        written = 0
        for emitted, kept in output.runs[1:]:
            room = min(depth, job.new - written - 1)
            rounds, drafted = rounds + (room > 0), drafted + room
            for place in range(kept):
                accepted[place] += 1
            written += emitted
    return Counts(rounds, drafted, tuple(accepted))


# --- vLLM -----------------------------------------------------------------------------------------


def venv(of: str = VLLM.name) -> Path:
    """Where scripts/engines/setup.sh puts an environment unless another place is given; of: vllm or
    speculators."""
    name = (HERE / f"{of}.txt").read_text(encoding="utf-8").split()[0].replace("==", "-")
    given = os.environ.get("DRAFTTRAIN_ENGINES")
    return (Path(given) if given else cache_dir() / "engines") / name


def check_venv(folder: Path, of: str = VLLM.name) -> Path:
    """Raises: InputError for an environment that is not there, or was left half-made."""
    if not (folder / READY).is_file():
        raise InputError(
            f"no environment for {of} in {folder}: make it by scripts/engines/setup.sh {of}, or "
            "name it by --venv"
        )
    return folder


@dataclass(frozen=True)
class Served:
    """vLLM's answer."""

    texts: list[list[int]]
    counts: Counts | None
    read: tuple[str, ...]
    """Tensors of the drafter's file that were copied into the engine's model, to the last
    element."""
    seconds: dict[str, float]
    version: str


def speculative_of(command: str) -> dict[str, Any]:
    """What the command that `export` prints gives to `--speculative-config`."""
    words = shlex.split(command)
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


def serve(
    environment: Path, job: Job, speculative: dict[str, Any] | None, *, seconds: float = SECONDS
) -> Served:
    """Decode a job's prompts with vLLM, greedily and in float32, in a process of its own.

    Args:
        environment: by scripts/engines/setup.sh; speculative: as in `speculative_of`, None decodes
            plainly.
    Raises: EngineError if it fails or takes longer.
    """
    check_venv(environment)
    longest = (
        max(map(len, job.prompts))
        + job.new
        + 2 * (speculative or {}).get("num_speculative_tokens", 0)
    )
    request = {
        "target": str(job.folder),
        "prompts": job.prompts,
        "new": job.new,
        "dtype": "float32",
        "context": -(-(longest + 1) // 64) * 64,
        "speculative": speculative,
    }
    with tempfile.TemporaryDirectory(prefix="drafttrain-engine-") as scratch:
        place = Path(scratch)
        (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
        words = [
            str(environment / "bin/python"),
            str(HERE / "serve.py"),
            str(place / "request.json"),
            str(place / "answer.json"),
        ]
        run(words, place / "log", seconds)
        found = json.loads((place / "answer.json").read_text(encoding="utf-8"))
    counters, counts = found["counters"], None
    if speculative is not None:
        counts = Counts(
            counters["drafts"], counters["draft_tokens"], tuple(counters["accepted_tokens_per_pos"])
        )
    read = tuple(sorted((found["tensors"] or {"read": []})["read"]))
    return Served(found["texts"], counts, read, found["seconds"], found["version"])


def run(words: list[str], log: Path, seconds: float) -> None:
    """Run an engine, or what writes for one; neither it nor a process that it started
    remains."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(HERE),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        # A worker's error is far above those that follow from it.
        said = [line for line in lines if "Error: " in line] + lines[-20:]
        what = (
            f"did not answer within {seconds:g} s"
            if code is None
            else f"failed with exit code {code}"
        )
        raise EngineError(
            "\n".join([f"the engine {what}; its errors, and the end of what it said:", *said])
        )


def on_vllm(environment: Path, job: Job, package: Path, out: Path, tokens: int) -> Result:
    """Export a package to a new folder, serve it as the printed command says, and compare.

    Args:
        tokens: drafted a round; heads always draft as many as they are.
    Raises: InputError for what vLLM does not run, EngineError.
    """
    drafter = load_drafter(package, job.target)
    depth = drafter.max_depth or tokens
    exported = export_package(package, job.target, VLLM.name, out, tokens=depth)
    served = serve(environment, job, speculative_of(exported.command))
    tensors = set(open_directory(out, "exported").tensors)
    # A map of a reduced vocabulary; its other half is of no use while drafting, and not read.
    reduced = tensors >= set(MAPS)
    same = drafter.at(torch.float32) if reduced else over_full_vocabulary(drafter)
    ours = as_vllm(job, same, depth)
    read = tensors - {"t2d"} if reduced else tensors
    return vllm_result(type(drafter).__name__, job, served, ours, read)


def vllm_result(
    name: str, job: Job, served: Served, ours: Counts | None, tensors: set[str]
) -> Result:
    """Args: tensors: names of those in the drafter's file."""
    unread = tuple(sorted(tensors - set(served.read)))
    return Result(
        name,
        f"vLLM {served.version}",
        len(job.prompts),
        job.same(served.texts),
        served.counts,
        ours,
        unread,
    )


# --- transformers ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _noted() -> Iterator[list[tuple[int, int]]]:
    """(drafted, accepted) of every round of transformers' assisted generation while it lasts."""
    from transformers.generation.candidate_generator import AssistedCandidateGenerator as Candidates

    rounds: list[tuple[int, int]] = []
    lengths: list[int] = []
    get, update = Candidates.get_candidates, Candidates.update_candidate_strategy

    def get_candidates(self: Any, input_ids: Tensor, **more: Any) -> Any:
        found = get(self, input_ids, **more)
        lengths.append(found[0].shape[1] - input_ids.shape[1])
        return found

    def update_candidate_strategy(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        rounds.append((lengths.pop(), int(num_matches)))
        update(self, input_ids, scores, num_matches)

    patches = {
        "get_candidates": get_candidates,
        "update_candidate_strategy": update_candidate_strategy,
    }
    with unittest.mock.patch.multiple(Candidates, **patches):
        yield rounds


def assisted(job: Job, assistant: Any, depth: int) -> tuple[list[list[int]], Counts]:
    """Answers of transformers' `generate` with an assistant, and what it kept of it. The
    assistant's settings are changed."""
    settings = copy.deepcopy(assistant.generation_config)
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = depth, "constant"
    settings.assistant_confidence_threshold, settings.eos_token_id = 0.0, None
    assistant.generation_config = settings
    texts = []
    with _noted() as rounds:
        for prompt in job.prompts:
            ids = torch.tensor([prompt])
            out = job.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                do_sample=False,
                max_new_tokens=job.new,
                eos_token_id=None,
                pad_token_id=0,
            )
            texts.append(out[0, len(prompt) :].tolist())
    drafted = [(size, kept) for size, kept in rounds if size]
    accepted = tuple(sum(kept > place for _, kept in drafted) for place in range(depth))
    return texts, Counts(len(drafted), sum(size for size, _ in drafted), accepted)


def on_transformers(job: Job, package: Path, out: Path, tokens: int) -> Result:
    """The same as `on_vllm` with a draft model in transformers.

    Raises: InputError for what transformers does not draft with.
    """
    import transformers

    export_package(package, job.target, HF.name, out, tokens=tokens)
    assistant, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    texts, theirs = assisted(job, assistant.eval(), tokens)
    drafter = load_drafter(package, job.target)
    ours = as_transformers(job, over_full_vocabulary(drafter), tokens)
    unread = tuple(sorted({*report["unexpected_keys"], *report["missing_keys"]}))
    engine = f"transformers {transformers.__version__}"
    name = type(drafter).__name__
    return Result(name, engine, len(job.prompts), job.same(texts), theirs, ours, unread)


# --- the embedded target --------------------------------------------------------------------------


def embedded() -> Target:
    return load.smollm2(dtype="float32", device="cpu", attention="sdpa", pack=False)


def write_target(target: Target, folder: Path) -> Path:
    """A target as a directory of transformers, which engines read as a model.

    Raises: InputError if something is there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists: give a new or an empty folder")
    target.model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    return folder


def prompts_of(count: int) -> list[list[int]]:
    """The first held-out prompts of the shipped set."""
    return read_set(set_folder("builtin:smollm2")).prompts(count)


# --- all of it ------------------------------------------------------------------------------------


def prove(
    environment: Path, packages: Sequence[Path], prompts: int, new: int, tokens: int, place: Path
) -> list[Result]:
    for package in packages:
        check_pair(package, VLLM.name)
    target = embedded()
    for package in packages:  # What cannot be loaded is reported before an engine is started.
        load_drafter(package, target)
    print(f"decoding {prompts} prompts plainly", file=sys.stderr, flush=True)
    job = Job.of(target, write_target(target, place / "target"), prompts_of(prompts), new)
    plain = serve(environment, job, None)
    results = [vllm_result("plain decoding", job, plain, None, set())]
    for number, package in enumerate(packages):
        print(f"{package}", file=sys.stderr, flush=True)
        results.append(on_vllm(environment, job, package, place / f"vllm-{number}", tokens))
        if HF in engines_of(type(load_drafter(package, target))):
            results.append(on_transformers(job, package, place / f"hf-{number}", tokens))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "packages",
        nargs="+",
        type=Path,
        metavar="package",
        help="of a drafter for the embedded target",
    )
    parser.add_argument(
        "--venv", type=Path, help="vLLM's environment; made by scripts/engines/setup.sh"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=48, help="tokens of each answer")
    parser.add_argument(
        "--tokens", type=int, default=4, help="drafted a round; heads draft as many as they are"
    )
    options = parser.parse_args()
    if min(options.prompts, options.new, options.tokens) < 1:
        parser.error("--prompts, --new and --tokens need at least 1")
    try:
        environment = check_venv(options.venv or venv())
        with tempfile.TemporaryDirectory(prefix="drafttrain-proof-") as scratch:
            results = prove(
                environment,
                options.packages,
                options.prompts,
                options.new,
                options.tokens,
                Path(scratch),
            )
    except InputError as error:
        parser.error(str(error))
    except EngineError as error:
        parser.exit(1, f"{error}\n")
    title = (
        f"{options.prompts} prompts of {options.new} new tokens, greedy, float32; engine / "
        "drafttrain where they differ"
    )
    columns = (
        "",
        "engine",
        "same text",
        "rounds",
        "drafted",
        "accepted at 1, 2, ...",
        "tensors not read",
    )
    table(title, columns, [result.row() for result in results])
    if not all(result.holds for result in results):
        parser.exit(1, "an engine does not draft as drafttrain's own loop does\n")
    print(
        "every engine wrote the target's own text and accepted what drafttrain's own loop "
        "accepts, count for count"
    )


if __name__ == "__main__":
    main()
