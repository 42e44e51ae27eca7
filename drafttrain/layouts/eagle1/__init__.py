"""EAGLE-1 (arXiv:2401.15077) as vLLM, SGLang and its authors' code read it, and as older versions
of speculators wrote it.

| tensor                                   | shape  | |
| fc.weight                                | (d 2d) | columns of the embedding first, then the |
|                                          |        | feature's; in drafttrain it is the other way |
| fc.bias                                  | (d)    | vLLM drops it; SGLang leaves it random where |
|                                          |        | it is not there |
| layers.0.self_attn., mlp.                |        | a Llama block, no norm before attention |
| layers.0.post_attention_layernorm.weight | (d)    | |
| embed_tokens.weight                      | (v d)  | the target's: EAGLE's loader needs it, the |
|                                          |        | others borrow it |

No final norm; the head is the target's. Engines differ in `architectures`, so that no directory
serves vLLM and SGLang alike. Read from: vLLM 0.32 model_executor/models/llama_eagle.py and
llama.py, SGLang 0.5.23 srt/models/{llama,qwen2}_eagle.py, SafeAILab/EAGLE eagle/model/cnets1.py,
speculators 0.1 models/eagle.py.
"""

from __future__ import annotations

from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.layouts.eagle1.checking import check, default_engine, recognises
from drafttrain.layouts.eagle1.facts import READINGS, TOKEN_MAP
from drafttrain.layouts.eagle1.reading import read
from drafttrain.layouts.eagle1.writing import write
from drafttrain.layouts.layout import Layout, settings_of

LAYOUT = Layout(
    name="eagle1",
    what="EAGLE-1 heads",
    turn=50,
    readings=READINGS,
    recognises=recognises,
    check=check,
    default_engine=default_engine,
    drafters=(Eagle1,),
    write=write,
    read=read,
    shape=settings_of("bias"),
    speculators=("eagle",),
)
__all__ = ["LAYOUT", "TOKEN_MAP"]
