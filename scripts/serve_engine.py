"""Serve a tiny model of random weights on a real vLLM without a GPU, with KV events and their replay.

Usage: DIRECTORY/bin/python scripts/serve_engine.py MODEL_DIRECTORY --port P --events-port P --replay-port P [--blocks N]

where DIRECTORY is what `install_engine.py` made. The model is made where it is missing; it has a tokenizer and a chat
template with tools, and no weights: vLLM makes them up. This process becomes vLLM's. It is ready when GET /health
answers 200, in half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

NAME = "tiny"
TOPIC = "kv-events"
BLOCK = 32
"""Tokens in a block; vLLM's attention on CPUs takes multiples of 32 only."""
MAX_TOKENS = 2048

_TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "tokenizers" / "byte-level-bpe.json"
_CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
You can call functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_model(directory: Path) -> None:
    """Write the model's files. What they say of the network is as small as vLLM's attention allows."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads(_TOKENIZER.read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = max(*tokenizer["model"]["vocab"].values(), *ids.values()) + 1
    end, padding = ids["<|im_end|>"], ids["<|endoftext|>"]
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": MAX_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": end, "pad_token_id": padding},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": -(-tokens // 64) * 64,
            "max_position_embeddings": MAX_TOKENS,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "eos_token_id": end,
            "pad_token_id": padding,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def serve(directory: Path, port: int, events_port: int, replay_port: int, blocks: int) -> None:
    """Become vLLM."""
    # With an address in the place of the star vLLM would connect, and not listen.
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": TOPIC,
    }
    options = {
        "served-model-name": NAME,
        "load-format": "dummy",
        "dtype": "float32",
        "max-model-len": MAX_TOKENS,
        "max-num-seqs": 8,
        "block-size": BLOCK,
        "num-gpu-blocks-override": blocks,
        "tool-call-parser": "hermes",
        "host": "127.0.0.1",
        "port": port,
        "kv-events-config": json.dumps(events),
    }
    flags = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "enable-auto-tool-choice")
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    vllm = str(Path(sys.executable).with_name("vllm"))
    arguments = [f"--{name}={value}" for name, value in options.items()] + [f"--{name}" for name in flags]
    os.execve(vllm, [vllm, "serve", str(directory), *arguments], {**os.environ, **environment})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--events-port", type=int, required=True)
    parser.add_argument("--replay-port", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=64, help="in the whole cache")
    options = parser.parse_args()
    if not (options.model_directory / "config.json").exists():
        make_model(options.model_directory)
    serve(options.model_directory, options.port, options.events_port, options.replay_port, options.blocks)


if __name__ == "__main__":
    main()
