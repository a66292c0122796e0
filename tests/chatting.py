"""A small target that chats: Qwen3's architecture over bytes, ChatML's control tokens, a template of one's choice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from dflash import small_target, target

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Qwen3's does, an answer to the last question begins with its thoughts, an earlier one does not."""
COUNTED = """{{- messages|length ~ ' messages\\n' }}""" + CHATML
"""Says at the beginning what comes after: no beginning of a chat is rendered as in the whole."""
BARE = """
{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
"""No token ends a message."""
ALTERNATING = (
    """
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
{%- endfor %}"""
    + CHATML
)
VOCABULARY = 288


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """The small target's bytes, ChatML's two control tokens (272 and 273), and a template."""
    made = small_target.tokenizer()
    made.add_special_tokens(
        {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}, replace_extra_special_tokens=False
    )
    made.chat_template = template
    return made


def text(tokens: Any) -> str:
    """What tokens say."""
    decoded = tokenizer(None).decode(tokens)
    assert isinstance(decoded, str)
    return decoded


def model(**changes: Any) -> Any:
    """A random Qwen3 of four layers, with weights so large that it does not say one thing over and over."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.3,
        "eos_token_id": [256, 273],
    }
    maker: Any = transformers.Qwen3ForCausalLM
    return maker(transformers.Qwen3Config(**(sizes | changes))).eval().requires_grad_(False)


def chatting(template: str | None = CHATML, **changes: Any) -> target.Target:
    """The two together."""
    return target.Target(model=model(**changes), tokenizer=tokenizer(template), name="tiny", packs=True)


def folder(place: Path, template: str | None = CHATML, **changes: Any) -> Path:
    """The two as a folder in transformers' format."""
    with target.quiet():
        model(**changes).save_pretrained(place)
        tokenizer(template).save_pretrained(place)
    return place


def chat(*said: str, system: str | None = None) -> dict[str, Any]:
    """Messages that alternate, the user's first."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return {"messages": [{"role": "system", "content": system}, *messages] if system is not None else messages}


def write(file: Path, *lines: dict[str, Any] | bytes) -> Path:
    """A file of JSON lines; bytes are taken as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"".join(line + b"\n" for line in whole))
    return file


def many(count: int) -> list[dict[str, Any]]:
    """Chats of one and two turns, no two alike."""
    made = []
    for number in range(count):
        answer = f"{number * 37} is {number} times thirty-seven. " * (1 + number % 5)
        again = (f"and then {number}?", f"then it is {number * 11}") if number % 3 == 0 else ()
        made.append(chat(f"what is {number} times 37?", answer, *again))
    return made


class Process:
    """A process that says lines."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid = pid
        self._lines = os.fdopen(reader)
        self._status: int | None = None

    def line(self) -> str:
        """The next line; waits for it."""
        return self._lines.readline().rstrip("\n")

    def rest(self) -> list[str]:
        """All further lines; waits for the end."""
        return self._lines.read().splitlines()

    def kill(self) -> None:
        """SIGKILL, and its end."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self._lines.close()


@contextlib.contextmanager
def forked(work: Callable[[Callable[[str], None]], None]) -> Iterator[Process]:
    """Work in a process of its own, without the seconds that importing torch once more takes."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's, which have nothing to do just now
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            os.close(reader)
            with os.fdopen(writer, "w", buffering=1) as said:
                work(lambda line: print(line, file=said))
            code = 0
        except BaseException:  # noqa: BLE001  # the last thing that this process does
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    process = Process(pid, reader)
    try:
        yield process
    finally:
        process.close()
