"""Tokenizers with chat templates in the forms of two families, and a policy that says what a test wrote down."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.engines.answers import Generation
from megatron_rl.engines.sampling import Sampling
from megatron_rl.system.frozen_arrays import Candidates
from megatron_rl.types import Ints, StopReason

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THOUGHTS = ("<think>", "</think>")

# Gives the tokens of Qwen3's own: earlier reasoning stays only behind the last message of a user.
THINKING_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
# In the form of GLM-4.5's: the marker of the next message's role ends an answer.
OBSERVING_TEMPLATE = (Path(__file__).parent / "observing_template.jinja").read_text(encoding="utf-8")
OBSERVING_MARKERS = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
# Of no family of the library: every turn in brackets, nothing dropped.
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def chat_tokenizer(template: str = THINKING_TEMPLATE, *, markers: Sequence[str] = MARKERS) -> PreTrainedTokenizerFast:
    """A token per byte, behind them the markers of turns, calls and thoughts."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in THOUGHTS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>" if "<|im_end|>" in markers else "<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    return fast


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Policy:
    """A generator that says the next of `texts`, or what a function of all text so far says; ends with `end` and `reason` unless cut.

    Log-probs count on from -0.001, so that each token has one of its own. `version` is the weights'. Experts say the number of the request.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str] | Callable[[str], str], *, context: int = 4096) -> None:
        self.tokenizer, self.texts, self.context = tokenizer, texts, context
        self.version, self.asked, self.samplings, self.sessions = 3, [], [], []
        self.num_made = 0
        self.end, self.reason = "<|im_end|>", StopReason.STOP

    async def generate(
        self, token_ids: Ints, *, sampling: Sampling, num_samples: int = 1, session: str | None = None
    ) -> tuple[Generation, ...]:
        assert num_samples == 1
        self.asked.append(token_ids.tolist())
        self.samplings.append(sampling)
        self.sessions.append(session)
        said = self.texts(self.tokenizer.decode(token_ids)) if callable(self.texts) else self.texts[len(self.asked) - 1]
        ids = self.tokenizer.encode(said + self.end, add_special_tokens=False)
        reason = self.reason if len(ids) <= sampling.max_tokens else StopReason.LENGTH
        ids = ids[: sampling.max_tokens]
        log_probs = -0.001 * np.arange(self.num_made + 1, self.num_made + len(ids) + 1)
        self.num_made += len(ids)
        experts = np.full((len(token_ids) + len(ids) - 1, 1, 1), len(self.asked) % 256, np.uint8)
        candidates = Candidates.of([each, each + 1] for each in ids) if sampling.records_candidates else None
        return (Generation(np.array(ids), log_probs.astype(np.float32), np.full(len(ids), self.version), reason, experts, candidates),)
