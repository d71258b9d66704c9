"""A model that calls a tool when it is given some, and answers "Done." otherwise.

The next token depends on the newest one only, so that a table of weights is the whole model. The
chat template ends in the token `ASK` if there are tools and no result yet, else in `TELL`.
"""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AddedToken

from mlx_redrafter import Engine
from tests.helpers.models import tiny_sizes
from tests.helpers.tools import tool_tokenizer

ASK, TELL = "<ask>", "<tell>"
VOCAB_SIZE = 288
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name[:40] }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ (m.content or '')[:40] }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
    "{{ '<ask>' if tools and messages[-1].role != 'tool' else '<tell>' }}"
)


def calling_engine(kind: str = "json_tools") -> Engine:
    """An engine of such a model, with the marks of one of mlx-lm's parsers."""
    tokenizer = tool_tokenizer(kind)
    tokenizer._tokenizer.add_tokens([AddedToken(mark, special=True) for mark in (ASK, TELL)])
    tokenizer._tokenizer.chat_template = TEMPLATE
    return Engine(_model(tokenizer), tokenizer, "lookup")


def _model(tokenizer: TokenizerWrapper) -> nn.Module:
    table = mx.random.normal((VOCAB_SIZE, VOCAB_SIZE), scale=0.1, key=mx.random.key(0))
    # Whatever comes before, a quotation mark and a brace end strings and objects soon.
    encode = tokenizer.encode
    table[:, encode('"')[0]] += 4.0
    table[:, encode("}")[0]] += 3.0
    chain = [*encode(f"{TELL}Done."), tokenizer.eos_token_id]
    for one, after in pairwise(chain):
        table[one, after] += 9.0
    table[encode(ASK)[0], tokenizer.tool_call_start_tokens[0]] += 20.0
    table[tokenizer.tool_call_end_tokens[-1], tokenizer.eos_token_id] += 20.0
    sizes = tiny_sizes("llama", VOCAB_SIZE, 1 << 17)
    sizes |= {"hidden_size": VOCAB_SIZE, "num_hidden_layers": 1, "intermediate_size": 8}
    model: Any = llama.Model(llama.ModelArgs(**sizes))
    model.update(tree_map(mx.zeros_like, model.parameters()))
    model.model.embed_tokens.weight = mx.eye(VOCAB_SIZE)
    model.model.norm.weight = mx.ones((VOCAB_SIZE,))
    model.lm_head.weight = table.T / VOCAB_SIZE**0.5
    mx.eval(model.parameters())
    model.eval()
    return model
