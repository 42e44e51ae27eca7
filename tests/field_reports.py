"""Faults that people report of tools of this kind, and what happens here.

A test that holds a report carries its number: `@pytest.mark.field("F07")`. All can be shown on a
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
    # Wrong numbers, wrong text, lost work
    "F70": (
        "rotary tables that depend on the length read (longrope)",
        "each row is read as plain decoding reads it, or the target is refused at loading; text "
        "that differs in float32 is called that, and no guarantee is claimed",
    ),
    "F71": (
        "a target that gives NaN or infinite values",
        "the run ends with the prompt, the position and the first layer that is not finite; no "
        "metric counts such a round",
    ),
    "F72": (
        "a finite loss with a gradient that is not finite, on one process or all",
        "no update from it; no checkpoint or package holds such values; the run ends and names the "
        "last good checkpoint, which resumes",
    ),
    "F73": (
        "a best checkpoint that is lost, foreign or damaged at resume",
        "checked at the start of the resume by name, digest and run",
    ),
    "F74": (
        "fresh layers with parameters that nobody initialised",
        "every parameter of every fresh module comes from the seed, for all families",
    ),
    "F75": (
        "tokenizers that differ in merges, normaliser or other parts",
        "another fingerprint; the refusal names the part and one text that is tokenised otherwise",
    ),
    "F76": (
        "conversations of several turns as held-out prompts",
        "every turn is decoded, counted by turn; what a limit leaves out is counted",
    ),
    "F77": (
        "stored features that are not what they say they are",
        "some rows are compared at the start of a fit; a mismatch names the likely cause",
    ),
    "F78": (
        "several sources of data and a limit",
        "limits and splits take from all sources in proportion, by seed; counted by source",
    ),
    "F79": (
        "columns that change the prompt, such as tools",
        "given to the template where it takes them; broken or unused ones are counted",
    ),
    "F80": (
        "plain texts, or token ids with a mask, as data",
        "taken as they are and checked against the vocabulary",
    ),
    "F81": (
        "reasoning mode and other arguments of the chat template",
        "given to every rendering, kept in set, package and fingerprint; another mode is warned "
        "about",
    ),
    # Ends badly
    "F82": (
        "a lone surrogate in a role or in the words of a template's refusal",
        "left out with its row number; nothing that was written is lost",
    ),
    "F83": (
        "a head that did not move, a schedule whose updates have rate 0",
        "a package is written; such a schedule is warned about before training",
    ),
    "F84": (
        "variables of processes that contradict each other, a rank without its peers",
        "refused at once; waiting is reported after some seconds; TERM ends it",
    ),
    "F85": ("a checkpoint whose optimiser lacks moments", "refused, naming what is missing"),
    "F86": ("custom_generate with stop strings and a tokenizer", "works as plain generate does"),
    "F87": (
        "a target that takes no tree mask, or has none of the usual attention",
        "one line: it is not supported, and why",
    ),
    "F88": (
        "huge finite weights; a list of draft ids next to a size, or with wrong ids",
        "one line; settings that contradict each other are refused; ids are checked",
    ),
    "F89": (
        "paths with quotes, spaces, letters outside ASCII, ~ or =",
        "every door reads paths in the same way, or says how to quote them",
    ),
    "F90": (
        "a full or limited disk in capture, synthesize, packaging",
        "path, need, free space and reserve are named",
    ),
    # Shared machines, records, first impressions
    "F91": (
        "other values of umask, a shared cache",
        "files are 0666 and folders 0777 less the umask, all alike in one output",
    ),
    "F92": (
        "secrets in settings: tokens, passwords in addresses, keys from the environment",
        "masked in everything that is written or sent",
    ),
    "F93": (
        "the same target in another schema, dtype or folder",
        "the same fingerprint; a change of dtype is reported as such and warned about",
    ),
    "F94": (
        "slow doors: --help, and wrong values refused after the target was loaded",
        "neither imports torch; all settings are checked before the target is loaded",
    ),
    "F95": (
        "fewer heads than the default trees are deep",
        "default trees are cut to what the drafter can fill, and that is reported",
    ),
    "F96": (
        "a finished folder, another tokenizer, chat=false, turns left out",
        "each is reported in its own words",
    ),
    "F97": (
        "an adopted directory whose config lacks or contradicts the number of heads",
        "adopt and check judge alike",
    ),
    "F98": (
        "targets whose layers have other norms or biases",
        "a fresh decoder layer that works for any of them, and no untrue reason",
    ),
    "F99": (
        "a long run that cannot be tried first",
        "fit dry_run=true does everything but training, and estimates sizes and time",
    ),
    "F100": (
        "alternating or local attention that the cache does not know",
        "counted over positions, or refused by the probe at loading",
    ),
    "F101": (
        "a wide column that nothing reads, very many prompts",
        "only named columns are read, in batches; progress after a second",
    ),
    "F102": (
        "resume with a path, a folder or a name that does not exist",
        "each cause has its own words; resume=best works",
    ),
}
"""{number: what people report, what happens here}"""
