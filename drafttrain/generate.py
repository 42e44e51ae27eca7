"""Decode with a package and see it work: accepted drafts are marked in the text, tau and speed are
written below it.

With prompt="..." one answer is written. Without it, in a terminal, turns are asked for until an
empty line; the conversation is kept as token ids and never encoded again. Otherwise the prompt is
read from standard input.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain.asking.generate import check_settings, readable
from drafttrain.wiring.doors import door

DOOR = door("generate", text=("prompt", "system", "tree", "rule"), check=check_settings)
if __name__ == "__main__":
    DOOR.greet(__doc__)

from rich.console import Console
from rich.text import Text

from drafttrain.checks import path_of
from drafttrain.data.template import ChatPieces
from drafttrain.decoding.loop import Listener, Output
from drafttrain.decoding.plan import UNKEPT, Plan
from drafttrain.decoding.speculator import Speculator
from drafttrain.decoding.unfolding import Unfolding
from drafttrain.drafter.base import Drafter
from drafttrain.errors import InputError
from drafttrain.flow import Tally
from drafttrain.nn.sampling import fresh_seed
from drafttrain.packaging.decoding import read_plan
from drafttrain.packaging.manifest import DECODING, read_config
from drafttrain.packaging.reading import load_drafter, target_for
from drafttrain.target.load import tokenizer_only
from drafttrain.target.model import Target, outside
from drafttrain.tree.topology import Tree
from drafttrain.wiring.building import build

STYLE = "green underline"
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: "\u2421"
}
"""Control characters as pictures: a text cannot move the cursor or set colours."""


@DOOR
def main(cfg: DictConfig) -> None:
    asked = check_settings(cfg)
    package = path_of("package", cfg.package)
    read_config(package)
    prompt = prompt_of(cfg.prompt)
    need_tokenizer(OmegaConf.to_container(cfg.target))  # type: ignore[arg-type]
    target: Target = build(cfg.target, work="decode")
    target = target_for(package, target)
    drafter = load_drafter(package, target)
    plan = read_plan(package / DECODING, drafter)
    speculator = Speculator(target, drafter, plan, dtype=cfg.dtype)
    plan = asked.plan(speculator)
    if not cfg.chat:
        warn_of_texts(target, drafter)
    screen = Screen(mark=cfg.mark)
    conversation = Conversation(target, chat=cfg.chat, system=cfg.system)
    seed = fresh_seed() if cfg.seed is None else cfg.seed
    for number, said in enumerate([prompt] if prompt is not None else turns()):
        try:
            ids = conversation.prompt(readable(said), cfg.max_new_tokens)
        except InputError as error:
            if prompt is not None:
                raise
            print(f"generate: {error}", file=sys.stderr)
            continue
        wanted = Wanted(ids, plan, cfg.max_new_tokens, seed + number)
        output, tally, seconds = answer(speculator, wanted, screen)
        conversation.keep(ids, output)
        close(speculator, wanted, screen, (output, tally, seconds), compare=cfg.compare)


# --- before long work starts ----------------------------------------------------------------------


def prompt_of(given: Any) -> str | None:
    """The prompt given, or standard input's; None if a person is there to be asked."""
    if given is not None:
        return readable(str(given))
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    try:
        text = "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not {error.encoding.upper()} (byte {error.start + 1}): save it as "
            "that"
        ) from error
    if not text.strip():
        raise InputError('nothing to answer: give prompt="...", or text on standard input')
    return readable(text.strip("\n"))


def need_tokenizer(target: dict[str, Any]) -> None:
    """Refuse before weights are read if text cannot be read or written.

    Args:
        target: its settings.
    """
    if tokenizer_only(target) is None:
        raise InputError("this target came without a tokenizer: text cannot be read or written")


def warn_of_texts(target: Target, drafter: Drafter) -> None:
    """A drafter that has learned from conversations is asked to go on with a text."""
    if drafter.learns and getattr(target.tokenizer, "chat_template", None):
        print(
            "generate: chat=false: sets for this target hold conversations in its chat template; "
            "where the package was trained on them, fewer drafts may be accepted in a text without "
            "it. The text is the target's either way",
            file=sys.stderr,
        )


def turns() -> Iterator[str]:
    """What a person types, until an empty line or the end of input."""
    print("generate: type what the target is to answer; an empty line ends", file=sys.stderr)
    while True:
        try:
            said = input("\n> ")
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            print(
                f"generate: that was not {error.encoding.upper()}: type it again", file=sys.stderr
            )
            continue
        if not said.strip():
            return
        yield said


# --- a conversation as ids ------------------------------------------------------------------------


class Conversation:
    """Grows turn by turn as token ids; what was written is never decoded and encoded again."""

    def __init__(self, target: Target, *, chat: bool, system: str | None = None) -> None:
        self.target, self.system = target, system
        self.pieces = ChatPieces(target.tokenizer, target.stop_ids) if chat else None
        self.ids: list[int] = []
        self.turns = 0
        """That were answered."""

    def prompt(self, said: str, room: int) -> list[int]:
        """Everything up to the first token of the answer.

        Raises: InputError if not one token fits the target's context, or the template refuses.
        """
        if self.pieces is None:
            tokenizer: Any = self.target.tokenizer
            more = tokenizer(said, add_special_tokens=not self.ids)["input_ids"]
        elif not self.ids:
            lead = [{"role": "system", "content": self.system}] if self.system else []
            more = self.pieces.first_prompt([*lead, {"role": "user", "content": said}])
        else:
            more = self.pieces.answer_to_answer(said, self.turns + 1, self.system)
            if self.turns == 1 and not self.pieces.grows(with_system=bool(self.system)):
                print(
                    "generate: the chat template would show earlier turns otherwise than they were "
                    "read and written; here they stay as they were",
                    file=sys.stderr,
                )
        ids = [*self.ids, *more]
        if not ids:
            raise InputError("the prompt has no tokens: say something")
        if max(ids) >= self.target.vocab_size:
            raise InputError(outside(max(ids), self.target))
        if len(ids) >= self.target.context:
            raise InputError(
                f"{len(ids)} tokens, the target's context holds {self.target.context_words}: "
                "shorten, or start again"
            )
        if len(ids) + room > self.target.context:
            print(
                f"generate: only {self.target.context - len(ids)} tokens fit the target's context "
                f"of {self.target.context_words}",
                file=sys.stderr,
            )
        return ids

    def keep(self, ids: list[int], output: Output) -> None:
        self.ids = [*ids, *output.ids]
        self.turns += 1
        if self.pieces is not None and output.finish != "stop":
            # The answer was cut: its turn is closed as the template closes one.
            end = self.pieces.turn_end()
            self.ids += [] if end is None else [end]


# --- text as it comes -----------------------------------------------------------------------------


class Screen:
    """Shows pieces of text, accepted drafts marked by colour or brackets."""

    def __init__(self, *, mark: str = "auto", out: Console | None = None) -> None:
        self.out = out or Console(highlight=False, soft_wrap=True)
        if mark == "auto":
            mark = (
                "colour" if self.out.is_terminal and not os.environ.get("NO_COLOR") else "brackets"
            )
        self.mark = mark
        self._inside = False

    def piece(self, found: tuple[str, bool] | None) -> None:
        """Show what `Unfolding` gives."""
        if found is None or not found[0]:
            return
        text, drafted = found
        text = text.translate(_CONTROLS)
        if self.mark == "brackets" and drafted != self._inside:
            text = ("[[" if drafted else "]]") + text
            self._inside = drafted
        self._print(text, STYLE if drafted and self.mark == "colour" else "")

    def boundary(self) -> None:
        """Between two target passes: brackets hold one pass's drafts."""
        if self._inside:
            self._print("]]")
            self._inside = False

    def line(self, text: str) -> None:
        self._print(text + "\n", "dim" if self.mark == "colour" else "")

    def _print(self, text: str, style: str = "") -> None:
        self.out.print(Text(text, style=style), end="", soft_wrap=True)
        self.out.file.flush()


@dataclass(frozen=True)
class Wanted:
    """One answer to decode."""

    ids: list[int]
    plan: Plan
    limit: int
    seed: int

    def decode(
        self, speculator: Speculator, plan: Plan, listener: Listener | None = None
    ) -> tuple[Output, Tally, float]:
        """The answer, its counts and the seconds it took."""
        start = time.perf_counter()
        (output,), tally = speculator.generate(
            [self.ids], max_new_tokens=self.limit, plan=plan, seed=self.seed, listener=listener
        )
        return output, tally, time.perf_counter() - start


def answer(speculator: Speculator, wanted: Wanted, screen: Screen) -> tuple[Output, Tally, float]:
    """Decode and show the text as it comes. The seconds are those of decoding, showing left out."""
    unfolding = Unfolding(speculator.target.tokenizer)
    shown = 0.0

    def listen(_row: int, new: list[int], accepted: int) -> None:
        nonlocal shown
        start = time.perf_counter()
        for place, token in enumerate(new):
            screen.piece(unfolding.add(token, place < accepted))
        screen.boundary()
        shown += time.perf_counter() - start

    output, tally, seconds = wanted.decode(speculator, wanted.plan, listen)
    screen.piece(unfolding.rest())
    screen.boundary()
    screen.line("")
    return output, tally, seconds - shown


def dtypes_of(speculator: Speculator) -> str:
    """What target and drafter ran in: `auto` may choose another the next time, and greedy text may
    then differ where two tokens are nearly as likely."""
    target = str(speculator.target.dtype).removeprefix("torch.")
    drafter = str(speculator.drafter.dtype or "").removeprefix("torch.")
    return target if drafter in ("", target) else f"{target}, drafter in {drafter}"


def close(
    speculator: Speculator,
    wanted: Wanted,
    screen: Screen,
    done: tuple[Output, Tally, float],
    *,
    compare: bool,
) -> None:
    """The closing lines: tau, accepted drafts, speed, and plain decoding's if asked for."""
    output, tally, seconds = done
    count = len(output.ids)
    if tally.tau is None:
        words = ["tau not available (no round of drafts)"]
    else:
        words = [
            f"tau {tally.tau:.2f} tokens per target pass",
            f"{tally.accepted_per_round:.2f} drafts accepted per round",
        ]
    words += [
        f"{count / seconds:.1f} tokens/s",
        f"{count} tokens in {seconds:.1f} s",
        f"ended by {output.finish}",
        f"in {dtypes_of(speculator)}",
    ]
    if not wanted.plan.policy.greedy:
        words.append(f"seed {wanted.seed}")
    guarantee = wanted.plan.guarantee_on(speculator.target)
    screen.line("\n" + ", ".join(words) + f"; guarantee: {guarantee}")
    if not compare:
        return
    policy = wanted.plan.policy
    plain, _, plain_seconds = wanted.decode(speculator, Plan(Tree.chain(0), policy))
    speed = (plain_seconds / len(plain.ids)) / (seconds / count)
    verdict = "" if speed >= 1 else ": drafting was SLOWER here"
    same = ""
    if policy.greedy:
        unkept = wanted.plan.guarantee_on(speculator.target, differed=True) == UNKEPT
        same = (
            ", the same text"
            if plain.ids == output.ids
            else ", ANOTHER TEXT, which rounding does not explain: the guarantee does not hold"
            if unkept
            else ", another text (a near-tie in low precision)"
        )
    screen.line(
        f"plain decoding: {len(plain.ids) / plain_seconds:.1f} tokens/s{same}; speed "
        f"{speed:.2f}x{verdict}"
    )


if __name__ == "__main__":
    main()
