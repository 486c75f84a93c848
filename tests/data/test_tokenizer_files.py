"""Tokenizers of other files: the ids of SentencePiece and tiktoken, by their own rules written out here."""

from __future__ import annotations

import base64
import itertools
import json
import lzma
import struct
from pathlib import Path

import pytest

from exchange.folders import write_folder
from phalanx.check.start import starting_point
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.exchange.import_run import import_folder

TEXTS = ("the the cat", " the  cat", "cat", "theé\n", "hhe t", "", "▁the")
WORDS = ["th", "the", "he", "\u2581t", "\u2581the", "\u2581c", "at", "cat", "\u2581cat", *"\u2581thecan"]
"""Mergeable pieces, the best first."""
PATTERN = r" ?\p{L}+| ?[^\s\p{L}]+|\s+"


def message(*fields: tuple[int, object]) -> bytes:
    """Returns a message of protocol buffers: numbers as varints, floats as such, texts and bytes."""
    out = b""
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            assert isinstance(content, bytes)
            out += varint(number << 3 | 2) + varint(len(content)) + content
    return out


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


PIECES = [
    *((text, 0.0, kind) for text, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3))),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((text, -float(rank), 1) for rank, text in enumerate(WORDS)),
]
LLAMA = {"trainer": [(3, 2), (35, 1)], "normalizer": [(3, 1), (4, 0)]}


def sentencepiece(trainer: list[tuple[int, object]], normalizer: list[tuple[int, object]], more: tuple = ()) -> bytes:
    """Returns a tokenizer.model."""
    pieces = [(1, message((1, text), (2, score), (3, kind))) for text, score, kind in (*PIECES, *more)]
    return message(*pieces, (2, message(*trainer)), (3, message(*normalizer)))


def pieces_of(text: str) -> list[int]:
    """SentencePiece's BPE: of all neighbours the two that make the piece of the highest score become one."""
    if not text:
        return []
    parts, scores = list("\u2581" + text.replace(" ", "\u2581")), {word: -rank for rank, word in enumerate(WORDS)}
    while pairs := [(scores[a + b], -n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = {text: number for number, (text, _, _) in enumerate(PIECES)}
    return [
        number for part in parts for number in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    ]


def test_a_model_of_sentencepiece_gives_its_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == pieces_of(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")
    assert (tokenizer.vocab_size, tokenizer.separator) == (len(PIECES), (2,))


@pytest.mark.parametrize("name", ["identity", "nmt_nfkc"])
def test_unigram_gives_the_ids_of_sentencepiece(tmp_path: Path, name: str) -> None:
    """Recorded with sentencepiece 0.2.3, which trained both models on texts of docs/: byte_fallback without
    normalisation, and nmt_nfkc."""
    folder = Path(__file__).parent / "unigram"
    (tmp_path / "tokenizer.model").write_bytes(lzma.decompress((folder / f"{name}.model.xz").read_bytes()))
    tokenizer = Tokenizer.load(tmp_path)
    recorded = json.loads((folder / "ids.json").read_text())
    for text, ids, decoded in zip(recorded["texts"], recorded[name], recorded[f"{name} decoded"], strict=True):
        assert tokenizer.encode(text).tolist() == ids, text
        if 0 not in ids and not text.startswith("\u2581"):  # sentencepiece writes \u2047, and leaves several spaces out
            assert tokenizer.decode(ids) == decoded, text
    [(ids, _)] = tokenizer.encode_marked([[("the</s>", True)]])
    assert (ids[-1], tokenizer.separator) == (2, (2,))


RANKS = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" t", b" the", b"at", b"cat", b"\xc3\xa9"]


def ranked(text: str) -> list[int]:
    """tiktoken's BPE of the words of PATTERN: of all neighbours the two that make the token of the lowest rank."""
    import regex

    ids = []
    for word in regex.findall(PATTERN, text):
        parts, ranks = [bytes([byte]) for byte in word.encode()], {token: rank for rank, token in enumerate(RANKS)}
        while pairs := [(ranks[a + b], n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_tekken(folder: Path, **config: object) -> None:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(RANKS)]
    sizes = {"pattern": PATTERN, "default_vocab_size": len(RANKS) + 30, "default_num_special_tokens": 30}
    (folder / "tekken.json").write_text(json.dumps({"config": sizes | config, "vocab": vocab}))


def test_a_tekken_json_has_its_special_tokens_first(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    tokenizer = Tokenizer.load(tmp_path / "tekken.json")
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == [30 + rank for rank in ranked(text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    [(ids, _)] = tokenizer.encode_marked([[("<s>[INST]the</s><SPECIAL_29>", True)]])
    assert ids.tolist() == [1, 3, 30 + RANKS.index(b"the"), 2, 29]
    assert tokenizer.vocab_size == len(RANKS) + 30


def test_known_files_of_tiktoken_are_read_by_their_number_of_ranks(tmp_path: Path) -> None:
    ranks = RANKS + [b"%05d|" % number for number in range(50256 - len(RANKS))]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"".join(lines))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the the cat").tolist() == ranked("the the cat")
    assert (tokenizer.vocab_size, tokenizer.separator) == (50257, (50256,))
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"".join(lines[:300]))
    with pytest.raises(
        DataError, match=r"300 ranks does not say how text is split.*AutoTokenizer as T; T.from_pretrained"
    ):
        Tokenizer.load(tmp_path)


USER = (("<x>", 0.0, 4),)
BAD = {
    "words": (
        sentencepiece([(3, 3)], [(4, 0)]),
        "a model of words or characters is not read with the same ids; convert it",
    ),
    "charsmap": (sentencepiece([(3, 2)], [(2, b"abc"), (4, 0)]), "precompiled_charsmap is damaged"),
    "runs": (
        sentencepiece([(3, 1)], [(4, 0)], (("\u2581\u2581", -3.0, 1),)),
        "pieces of several spaces, which are cut by rounding errors",
    ),
    "characters": (
        sentencepiece([(3, 1)], [(4, 0)], (("zth", -3.0, 1),)),
        "the character 'z' of its pieces is no piece",
    ),
    "user": (sentencepiece([(3, 2)], [(4, 0)], USER), "symbols of the user beside add_dummy_prefix"),
    "cut": (sentencepiece(**LLAMA)[:-3], "is damaged"),
    "varint": (b"\xff" * 20, "no model of SentencePiece"),
    "empty": (b"", "neither a model of SentencePiece nor ranks of tiktoken"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_says_how_to_convert(tmp_path: Path, name: str) -> None:
    content, said = BAD[name]
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        Tokenizer.load(tmp_path)
    assert "save_pretrained" in str(error.value)


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"config": {"default_vocab_size": 3}}'])
def test_a_wrong_tekken_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(DataError, match="tekken.json: "):
        Tokenizer.load(tmp_path)


def test_a_folder_with_such_a_tokenizer_is_imported(tmp_path: Path) -> None:
    write_folder(tmp_path / "theirs", tokens=0)
    (tmp_path / "theirs" / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    (tmp_path / "runs").mkdir()
    done = import_folder([tmp_path / "theirs"], tmp_path / "runs" / "ours")
    assert done.tokens == len(PIECES)
    assert Tokenizer.load(tmp_path / "runs" / "ours").encode("the cat").tolist() == pieces_of("the cat")
    assert Path(starting_point(str(tmp_path / "theirs")).tokenizer).name == "tokenizer.model"
