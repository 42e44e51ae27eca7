"""EAGLE-3 (arXiv:2503.01840), EAGLE-3.1 and P-EAGLE as vLLM, SGLang and EAGLE's code read them, and
as the library speculators keeps them.

x[i] is the residual stream after i of the target's blocks, so that a tap, the output of layer l
counted from 0, is x[l + 1]. `eagle_aux_hidden_state_layer_ids` numbers x[i] i at the top level,
where vLLM reads it, and i - 1 inside `eagle_config`, where SGLang does. Without it both guess x[2],
x[N/2], x[N-3], which is what EAGLE's code always reads.

| tensor                           | shape     | |
| fc.weight                        | (d n·t)   | n captured states of width t, ascending |
| fc_norm.{j}.weight               | (t)       | EAGLE-3.1: norms of the states before fc |
| midlayer. or layers.0.self_attn. |           | a Llama block that reads 2d: |
|                                  |           | [input_layernorm(E(x)); hidden_norm(feature)] |
| ... hidden_norm, input_layernorm | (d)       | in later layers one norm under both names |
| ... q_norm, k_norm               | (e)       | of a Qwen3 block |
| ... post_attention_layernorm     | (d)       | |
| norm.weight                      | (d)       | before the head |
| lm_head.weight                   | (w d)     | w of draft_vocab_size |
| d2t, t2d                         | (w), (v)  | iff w < v |
| embed_tokens.weight              | (v d)     | where d is not t |
| mask_hidden                      | (1 1 n·t) | P-EAGLE |

A head without captured states (`use_aux_hidden_state: false`) has no fc: it reads what the target's
own head reads. Rows turn by RoPE at their own position here, and one higher in some trainers: only
differences of positions matter.

Read from: vLLM 0.32 model_executor/models/{llama,qwen3}_eagle3.py, v1/spec_decode and
transformers_utils/configs/speculators, SGLang 0.5.23 srt/models/{llama,llama_eagle3}.py and
model_runner_components/spec_aux_hidden_state.py, SafeAILab/EAGLE eagle/model/{cnets,ea_model,
modeling_llama_kv}.py, speculators 0.9 models/eagle3.
"""

from __future__ import annotations

from drafttrain.drafter.eagle3 import Eagle3
from drafttrain.layouts.eagle3.checking import check, recognises
from drafttrain.layouts.eagle3.facts import KEY, READINGS
from drafttrain.layouts.eagle3.reading import judge, read, shape
from drafttrain.layouts.eagle3.writing import write
from drafttrain.layouts.layout import Layout

LAYOUT = Layout(
    name="eagle3",
    what="EAGLE-3 heads",
    turn=40,
    readings=READINGS,
    recognises=recognises,
    check=check,
    drafters=(Eagle3,),
    write=write,
    read=read,
    judge=judge,
    shape=shape,
    speculators=("eagle3",),
)
__all__ = ["KEY", "LAYOUT", "READINGS", "check"]
