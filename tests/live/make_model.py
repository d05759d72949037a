"""make_model.py DIRECTORY [--preset tiny|mid]: a small Qwen2 model for vLLM, without weights.

DIRECTORY gets the model's config.json, and DIRECTORY/tokenizer its tokenizer. The tokenizer needs a folder of its own:
next to a Qwen2 config.json, transformers would load it as Qwen2's byte-level one and split words differently.
Weights are left to `vllm serve --load-format dummy`, which draws random ones.

Runs in the virtual environment of install_vllm.sh.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

VOCABULARY = 8192  # tokens, the special ones included
SPECIAL = ("<s>", "</s>", "<unk>")  # token ids 0, 1 and 2
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True)
class Shape:
    """Size of the model; every head has 64 channels."""

    layers: int
    heads: int
    kv_heads: int
    mlp: int

    def config(self) -> Qwen2Config:
        """Return the Qwen2 configuration of this size, in bfloat16."""
        return Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            dtype="bfloat16",
            vocab_size=VOCABULARY,
            hidden_size=64 * self.heads,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.mlp,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )


PRESETS = {
    "tiny": Shape(layers=8, heads=8, kv_heads=4, mlp=1536),  # 29 M parameters, 8,192 bytes of KV cache per token
    "mid": Shape(layers=12, heads=12, kv_heads=4, mlp=3072),  # 110 M parameters, 12,288 bytes of KV cache per token
}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word: id 7 is "w7", so ids survive decoding and encoding again."""
    words = SPECIAL + tuple(f"w{token}" for token in range(len(SPECIAL), VOCABULARY))
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a small Qwen2 model for vLLM, without weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="mid")
    arguments = parser.parse_args()
    PRESETS[arguments.preset].config().save_pretrained(arguments.directory)
    word_tokenizer().save_pretrained(arguments.directory / "tokenizer")


if __name__ == "__main__":
    main()
