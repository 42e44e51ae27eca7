"""Conversations written by the target: its own user turns, or given prompts, answered turn by turn.

What a row says depends on its number, the settings and the target's dtype. In float32 it does not
depend on the rows that are written next to it. In low precision it does: products over batches of
another shape are rounded otherwise, and near ties are decided otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from drafttrain.data.conversations import Row
from drafttrain.data.row_journal import Journal
from drafttrain.data.shapes import Prompt
from drafttrain.data.template import REASONING_END, ChatPieces, text_ids
from drafttrain.errors import InputError, NotFinite
from drafttrain.nn import finite
from drafttrain.nn.sampling import Policy
from drafttrain.target import generation
from drafttrain.target.generation import Script, Segment
from drafttrain.target.model import Target, outside
from drafttrain.target.writing import SynthesisConfig


def is_reproducible(dtype: str) -> bool:
    """Are rows that a target writes in this dtype the same whatever is written next to them?"""
    return dtype in ("float32", "float64")


def reproducibility(dtype: str) -> str:
    """The same in words, for the manifest of a set and for the console."""
    if is_reproducible(dtype):
        return "rows are the same after a kill, with other slots and in several processes"
    return (
        "rows depend on their neighbours in the batch, so a kill, other slots or several "
        "processes can change them"
    )


def check(
    target: Target, config: SynthesisConfig, prompts: Iterable[Prompt | None] = (None,)
) -> ChatPieces | None:
    """Raise InputError if this target cannot write to such prompts with these settings. Returns the
    pieces of its chat template; None where only texts are continued."""
    if config.max_length > target.context:
        raise InputError(
            f"max_length {config.max_length} is beyond the target's context of "
            f"{target.context_words}"
        )
    if any(prompt is not None and prompt.read is not None for prompt in prompts):
        return None
    return ChatPieces(target.tokenizer, target.stop_ids)


def synthesize(
    target: Target,
    prompts: Iterable[tuple[int, Prompt | None]],
    config: SynthesisConfig,
    journal: Journal,
    *,
    slots: int,
    greedy: Callable[[int], bool] | None = None,
    report: Callable[[int, int], None] = lambda rows, tokens: None,
) -> None:
    """Write one conversation per (row number, prompt) into the journal; a prompt of None is written
    by the target too.

    Args:
        slots: rows written at the same time; in low precision they decide what is written, see
            `is_reproducible`.
        greedy: rows whose answers are written at temperature 0 in any case.
        report: called after every pass with rows finished and ids written so far.
    """
    prompts = list(prompts)
    pieces = check(target, config, [prompt for _, prompt in prompts])
    writer = _Writer(target, pieces, config, journal, greedy or (lambda _row: False))
    scripts = ((writer.script(row, prompt), config.chance(row, "words")) for row, prompt in prompts)
    written = 0
    for count in generation.run(target, scripts, slots=slots, capacity=config.max_length):
        written += count
        report(writer.done, written)


class _Writer:
    def __init__(
        self,
        target: Target,
        pieces: ChatPieces | None,
        config: SynthesisConfig,
        journal: Journal,
        greedy: Callable[[int], bool],
    ) -> None:
        self.target, self.config, self.journal, self.greedy = target, config, journal, greedy
        self._pieces = pieces
        self._known: dict[int, tuple[list[int], list[int]]] = {}
        self.done = 0

    @property
    def pieces(self) -> ChatPieces:
        """Of the chat template, which conversations need."""
        assert self._pieces is not None
        return self._pieces

    def script(self, row: int, prompt: Prompt | None) -> Script:
        temperature, answers = self.config.drawn(row)
        if self.greedy(row):
            temperature = 0.0
        policy = Policy(temperature, self.config.top_k, self.config.top_p)
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        finish: list[str] = []
        problem = ""
        try:
            turns = self._self_talk(answers) if prompt is None else self._given(prompt)
            lead: tuple[list[int], bool] | None = next(turns)
            while lead is not None:
                read, by_user = lead
                if len(ids) + len(read) + 2 > self.config.max_length:
                    problem = f"prompt longer than max_length {self.config.max_length}"
                    break
                if beyond := [token for token in read if token >= self.target.vocab_size]:
                    problem = outside(beyond[0], self.target)
                    break
                limit = self.config.max_user if by_user else self.config.max_answer
                limit = min(limit, self.config.max_length - len(ids) - len(read))
                ids += read
                written = yield Segment(
                    read, limit, self.config.user if by_user else policy, self.target.stop_ids
                )
                ended = bool(written) and written[-1] in self.target.stop_ids
                if not by_user:
                    spans.append((len(ids), len(ids) + len(written)))
                    finish.append("stop" if ended else "length")
                ids += written
                if not by_user and not ended:
                    break  # A cut answer has no next turn.
                if by_user and (not ended or len(written) < 2):
                    problem = (
                        "empty user turn"
                        if ended
                        else f"user turn longer than {self.config.max_user}"
                    )
                    break
                lead = next(turns, None)
                if lead is not None and not by_user and self._rewritten(prompt, written):
                    finish[-1] = "template"
                    break
        except InputError as error:
            problem = str(error)
        except NotFinite as error:
            raise finite.fault(self.target, error.ids, f"row {row}") from error
        except generation.Full:
            problem = f"conversation longer than max_length {self.config.max_length}"
        if spans:
            self.journal.add(
                Row(row, tuple(ids[: spans[-1][1]]), tuple(spans), tuple(finish), temperature)
            )
        else:
            self.journal.skip(row, problem or "nothing written")
        self.done += 1

    def _rewritten(self, prompt: Prompt | None, answer: list[int]) -> bool:
        """Would a later turn see other text than what was read and written up to here?"""
        system = self.config.system if prompt is None else prompt.system
        pieces = self.pieces if prompt is None else self.pieces.given(prompt.arguments)
        if not pieces.grows(with_system=bool(system)):
            return True
        return not self.pieces.keeps_reasoning and REASONING_END in self.pieces.tokenizer.decode(
            answer
        )

    def _self_pieces(self, turn: int) -> tuple[list[int], list[int]]:
        """What is read before a user turn, which count from 1, and before its answer."""
        if turn not in self._known:
            pieces, system = self.pieces, self.config.system
            before = (
                pieces.before_user(system) if turn == 1 else pieces.answer_to_user(turn, system)
            )
            self._known[turn] = before, pieces.user_to_answer(turn, system)
        return self._known[turn]

    def _self_talk(self, answers: int) -> Iterator[tuple[list[int], bool]]:
        """(ids to read, whether the user writes next)."""
        for turn in range(1, answers + 1):
            before_user, user_to_answer = self._self_pieces(turn)
            yield before_user, True
            yield user_to_answer, False

    def _given(self, prompt: Prompt) -> Iterator[tuple[list[int], bool]]:
        if prompt.read is not None:
            yield text_ids(self.target.tokenizer, prompt.users[0], prompt.read), False
            return
        first, *rest = prompt.users
        pieces = self.pieces.given(prompt.arguments)
        yield pieces.first_prompt([*prompt.lead(), {"role": "user", "content": first}]), False
        for turn, user in enumerate(rest, start=2):
            yield pieces.answer_to_answer(user, turn, prompt.system), False
