"""Faults that people report of tools of this kind, and what happens here.

A test that holds a report carries its number: `@pytest.mark.field("F07")`. All 69 can be shown on a
CPU, so none is without a test; `test_field_reports.py` compares the two.
"""

from __future__ import annotations

REPORTS: dict[str, tuple[str, str]] = {
    # Data, masks and templates
    "F01": (
        "empty conversations, assistant-first ones, only a system message",
        "left out and counted by reason with row numbers; strict=true stops",
    ),
    "F02": (
        "a chat template that refuses a row",
        "that row is left out with the template's own words; if all are, it stops before the "
        "target is loaded",
    ),
    "F03": (
        "a system text as message, as column, as both, or as the template's default",
        "it is in the text once, as the template renders it, and never supervised",
    ),
    "F04": (
        "a template that strips or inserts reasoning",
        "ids are what the template renders; no later turn where the answer would be shown "
        "otherwise; preview shows tokens and mask",
    ),
    "F05": (
        "a template without assistant markers",
        "the mask is that of the ids that the target wrote, no marker is needed; the supervised "
        "share is printed",
    ),
    "F06": (
        "an end-of-turn token outside the mask",
        "every answer's span ends on its end token unless a limit cut it",
    ),
    "F07": (
        "prompts longer than the window",
        "ids, mask and features are cut alike, rows without a label go and are counted, none "
        "left stops the run",
    ),
    "F08": (
        "answers that another encoding would write with other ids",
        "generated ids are kept; how many rows would have changed is counted",
    ),
    # Shifts and off-by-one
    "F09": (
        "a mask that was not moved with the inputs",
        "position, feature, input, label and weight are as documented for every drafter",
    ),
    "F10": (
        "a block position trained one off from decoding",
        "decoded acceptance on a learned text is its teacher-forced accuracy",
    ),
    "F11": (
        "later draft steps at the wrong position",
        "every deeper step equals a recomputation from scratch",
    ),
    "F12": (
        "answers shorter than the draft is deep",
        "only labels that exist count, nothing wraps round, no NaN",
    ),
    # Tokenizers and vocabularies
    "F13": (
        "a padded output head",
        "sizes are the model's, ids the tokenizer's; ids beyond the model are refused by name",
    ),
    "F14": (
        "a draft vocabulary larger than the data, of 1, or beyond the full one",
        "filled up, stop and control tokens in it; 1 and too many are refused",
    ),
    "F15": (
        "tied embeddings, weights in one file or several",
        "the head is the embedding, and every round trip gives the same logits",
    ),
    "F16": (
        "end ids as a list, pad or start ids that are missing",
        "any of the ends stops; padding is never supervised, a real end token equal to it is",
    ),
    "F17": (
        "labels outside the draft vocabulary",
        "finite loss; they count as misses; coverage is printed",
    ),
    # Resuming and checkpoints
    "F18": (
        "a run stopped in mid-epoch",
        "rows and weights of the parts are those of one run, bit for bit",
    ),
    "F19": (
        "the rate over accumulation and a resume",
        "it is a function of only the updates and ends on the last",
    ),
    "F20": ("an end between two save points", "last.ckpt is the true last step"),
    "F21": (
        "a start in a used folder",
        "refused; a resume lists what differs and refuses what matters; the best score goes on",
    ),
    "F22": (
        "a synthesis or a capture that was killed",
        "every row once, finished ones are not computed again",
    ),
    # Several processes
    "F23": (
        "a process that has nothing to learn from",
        "equally many batches everywhere, weights as from one process",
    ),
    "F24": (
        "a process that prepares for longer than the others wait",
        "preparation is commands of its own, without collectives; who is waited for is said, a "
        "stopped one is named",
    ),
    "F25": (
        "rows of 40,000 characters and worker processes",
        "rows are encoded in the process itself, without a deadlock; a number of workers is no "
        "setting and refused",
    ),
    "F26": ("processes started across a second", "one folder, given by the first process"),
    # Memory and disk
    "F27": (
        "a store with rows longer than the length asked for",
        "features are cut like ids and mask",
    ),
    "F28": (
        "a store larger than the disk",
        "the estimate is printed and refused before anything is written",
    ),
    "F29": ("checkpoints that pile up", "the last n, best and last stay; half-written ones go"),
    "F30": (
        "packages many times the drafter's size",
        "only trained tensors, in a dtype that is named; the size is printed",
    ),
    # NaN and precision
    "F31": ("batches without a label", "no NaN, no update, counted"),
    "F32": (
        "NaN or another shape in stored features",
        "refused, naming the rows, before they are learned from",
    ),
    "F33": (
        "a loss that depends on padding",
        "gradients are weighed by labels over the complete update",
    ),
    "F34": ("bfloat16 weights that do not change", "weights and updates are float32"),
    # Good training numbers, low acceptance
    "F35": (
        "high accuracy, acceptance near 1",
        "an overfitted text is decoded at near full depth; evaluate compares the two and says "
        "where they part",
    ),
    "F36": ("rotary settings of the target", "the drafter turns by the target's own"),
    "F37": (
        "captured layers that were not recorded",
        "a package without them is refused, nothing is guessed",
    ),
    "F38": (
        "features of another row",
        "the same bits whatever the company, order and number of requests",
    ),
    "F39": (
        "draft state left over from a rejection",
        "after every round the draft equals one made of true features",
    ),
    # Packages, export and loading
    "F40": (
        "missing, renamed, misshapen and strange tensors",
        "refused by name, nothing is loaded in part",
    ),
    "F41": (
        "names and keys of another engine",
        "every export is checked as if it were foreign and comes back bit for bit",
    ),
    "F42": (
        "deeper or wider trees than the drafter fills",
        "cut with a message or refused; malformed trees are refused",
    ),
    "F43": ("unknown keys, future formats", "refused by name, with the nearest known one"),
    "F44": (
        "an attention backend that is not there",
        "a package names none: it decodes with whichever its target was loaded with, to the same "
        "text",
    ),
    # Metrics
    "F45": ("rates above 1 with several processes", "counts are added up once and divided last"),
    "F46": (
        "which acceptance is meant",
        "conditional and unconditional rates have names and add up to the accepted length",
    ),
    "F47": (
        "averages of training and evaluation mixed",
        "every logged value is the mean of its own window",
    ),
    "F48": ("the best by loss", "best is by decoded tau, ties keep the earlier"),
    "F49": ("nothing to evaluate", "not available: never NaN, never 0 as the best"),
    # Losslessness
    "F50": ("an end token within a block", "the text ends there, streamed text too"),
    "F51": ("more tokens than asked for", "exactly as many as plain decoding"),
    "F52": (
        "greedy text that differs",
        "in float32 it does not, for any drafter and tree; elsewhere the gap is shown, by one "
        "command",
    ),
    "F53": (
        "sampling that changes the distribution",
        "chi-square tests against the target's own distribution",
    ),
    "F54": (
        "seeds",
        "the same seed the same text, another another; decoding moves no random state",
    ),
    "F55": ("empty, single-token and very long prompts", "as plain decoding, or its own error"),
    "F56": ("one draft a round, or none", "1 keeps the text, 0 is plain decoding"),
    "F57": (
        "attention biases, tied embeddings, further norms",
        "plain decoding is the library's own, token for token",
    ),
    # Speed
    "F58": (
        "compilation for every length",
        "nothing is compiled on a CPU, and there is no switch for it",
    ),
    "F59": ("slower than no draft", "both speeds are measured in turn, and slower is said plainly"),
    "F60": (
        "answers written one by one",
        "side by side in a fraction of the passes, with the same text",
    ),
    # Settings, messages and docs
    "F61": ("misspelt settings", "refused at once with the nearest name"),
    "F62": ("missing arguments", "refused in seconds, before weights are read"),
    "F63": (
        "nothing left after filtering",
        "one message with counts by reason and the first row's keys",
    ),
    "F64": (
        "what the length limit means",
        "the package names the trained length; beyond it the text stays exact and evaluate warns",
    ),
    "F65": (
        "what is a normal number",
        "the README has figures and durations of the first run; a run says how far it is",
    ),
    "F66": (
        "data in other common shapes",
        "the documented ones give the same prompts, others are refused with the list and the keys",
    ),
    # Security
    "F67": ("code inside a file", "only safetensors, and checkpoints without code, are read"),
    "F68": ("remote code", "not run without the switch, which the refusal explains"),
    "F69": ("an output folder with other files", "refused, naming them; links and parents too"),
}
"""{number: what people report, what happens here}"""
