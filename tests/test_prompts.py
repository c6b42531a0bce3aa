"""Prompts from files: every form that is read, and the file and line of what is not."""

import json
from pathlib import Path

import pytest

from engine.demo import EMBEDDED_TARGET
from engine.prompts import ByteTokenizer, HFTokenizer, Tokenizer, read_prompts

WORDS = ("[UNK]", "hello", "world", "<user>", "<assistant>", "<end>")
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def saved_tokenizer(folder: Path, template: str | None) -> HFTokenizer:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return HFTokenizer(str(folder))


def read(path: Path, tokenizer: Tokenizer, *lines: object) -> list[list[int]]:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return [prompt.tolist() for prompt in read_prompts(path, tokenizer, 264)]


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    assert read(tmp_path / "p.txt", ByteTokenizer(), "ab", "", "\u00e9") == [[97, 98], [0xC3, 0xA9]]


def test_every_form_of_json(tmp_path: Path) -> None:
    tokenizer = saved_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    found = read(
        tmp_path / "p.jsonl",
        tokenizer,
        {"text": "hello world"},
        {"input_ids": [5, 263]},
        {"messages": turns[:1]},
        {"id": "x", "conversations": [*turns, {"from": "human", "value": "hello"}]},
    )
    first = [3, 1, 5, 4]
    assert found == [[1, 2], [5, 263], first, [*first, 2, 5, *first]]


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    assert read(tmp_path / "p.jsonl", HFTokenizer(str(tmp_path / "absent")), {"input_ids": [1, 2]}) == [[1, 2]]
    with pytest.raises(ValueError, match=r"p.jsonl, line 1: expected a tokenizer in .*absent, found none that loads"):
        read(tmp_path / "p.jsonl", HFTokenizer(str(tmp_path / "absent")), {"text": "a"})
    with pytest.raises(ValueError, match=r"p.jsonl, line 1: expected a tokenizer in .*embedded, found none; give"):
        read(tmp_path / "p.jsonl", HFTokenizer(str(EMBEDDED_TARGET)), {"text": "a"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ([1], "line 2: no JSON object"),
        ({"question": "a"}, "line 2: no conversation: found only question; expected conversations, messages, text or"),
        ({"text": ""}, "line 2: expected at least one token, found an empty prompt"),
        ({"input_ids": [264]}, "line 2: expected token ids from 0 to 263, the target's vocabulary, found others"),
        ({"input_ids": ["a"]}, "line 2: input_ids is no list of whole numbers"),
        ({"messages": [{"from": "human"}]}, "line 2: no conversation: expected a content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 2: expected a turn that is not the assistant's"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: .* the embedded target has no chat template"),
    ],
)
def test_a_bad_line_is_named(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"p.jsonl, {message}"):
        read(tmp_path / "p.jsonl", ByteTokenizer(), {"text": "a"}, line)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p.csv: expected a .txt file \(a prompt a line\) or a .jsonl file"):
        read(tmp_path / "p.csv", ByteTokenizer(), "a")
    with pytest.raises(ValueError, match="p.txt: expected at least one prompt, found none"):
        read(tmp_path / "p.txt", ByteTokenizer(), " ")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="p.txt: expected text in UTF-8"):
        read_prompts(tmp_path / "p.txt", ByteTokenizer(), 264)


def test_templates_that_are_missing_or_refuse(tmp_path: Path) -> None:
    turn = {"messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(ValueError, match="line 1: expected a chat template in the tokenizer of .*without, found none"):
        read(tmp_path / "p.jsonl", saved_tokenizer(tmp_path / "without", None), turn)
    strict = saved_tokenizer(tmp_path / "strict", "{{ raise_exception('system turn first') }}")
    with pytest.raises(
        ValueError, match="line 1: the chat template of .*strict refused the conversation: system turn first"
    ):
        read(tmp_path / "p.jsonl", strict, turn)
