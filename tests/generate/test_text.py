"""Text from tokens as they come, against the text of all tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, NumberTokenizer, train_bpe
from phalanx.generate.text import OrderedOutput, TextStream

BPE = train_bpe(["the quick brown fox über den Zaun, naïve 日本語 text " * 20], 300)
TOKENIZERS = [ByteTokenizer(), BPE, CharTokenizer("abc déf\n", unknown=True)]


def streamed(tokenizer, prompt, tokens, stop=()) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(tokenizer, prompt, stop), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@given(st.sampled_from(TOKENIZERS), st.text("abc déf日本🙂\n", min_size=1), st.text("abc déf日本🙂\n"))
def test_the_pieces_are_the_whole_text_and_whole_characters(tokenizer, prompt, text):
    ids = tokenizer.encode(text).tolist()
    pieces, stream = streamed(tokenizer, tokenizer.encode(prompt).tolist(), ids)
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)
    if tokenizer is not TOKENIZERS[2]:
        assert not any("\ufffd" in piece for piece in pieces)


def test_numbers_keep_the_blanks_between_them():
    pieces, _ = streamed(NumberTokenizer(40), [5, 0, 17], [4, 9, 33])
    assert "".join(pieces) == " 4 9 33"


def test_bytes_that_are_no_text_come_in_the_end():
    pieces, stream = streamed(ByteTokenizer(), [65], [0xF0, 0x9F])
    assert pieces[:2] == ["", ""]
    assert stream.text == "\ufffd"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_nothing_of_a_stop_string_is_ever_shown(text, stop):
    tokenizer = ByteTokenizer()
    pieces, stream = streamed(tokenizer, [65], tokenizer.encode(text).tolist(), stop)
    ends = [text.find(string) + len(string) for string in stop if string in text]
    first = min(ends, default=None)  # the text ends with the token that completes a stop string
    seen = text if first is None else text[:first]
    places = [seen.find(string) for string in stop if string in seen]
    assert "".join(pieces) == (seen[: min(places)] if places else seen)
    assert stream.stopped == bool(places)


def test_texts_come_in_order_and_the_first_at_once():
    written: list[str] = []
    output = OrderedOutput(written.append, ["A:", "B:", "C:"])
    output.give(1, "b")
    output.give(0, "a")
    assert "".join(written) == "A:a"
    output.end(1)
    output.give(2, "c")
    output.end(0)
    assert "".join(written) == "A:a\nB:b\nC:c"
    output.give(2, "d")
    output.interrupt()
    assert "".join(written) == "A:a\nB:b\nC:cd\n"
