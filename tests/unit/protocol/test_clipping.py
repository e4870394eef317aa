"""Texts of a bounded size."""

from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.clipping import clip, clip_error
from sllm_runtime.protocol.errors import ErrorBody

ANY = st.text(st.characters(codec=None))


@given(text=ANY, nbytes=st.integers(0, 40))
def test_a_text_is_cut_between_two_characters(text: str, nbytes: int) -> None:
    whole, kept = text.encode(errors="backslashreplace"), clip(text, nbytes).encode()
    assert whole.startswith(kept)
    assert nbytes - 3 <= len(kept) <= nbytes or kept == whole


def test_an_error_fits_in_a_frame() -> None:
    long = "\N{GRINNING FACE}" * limits.MAX_PART
    body = ErrorBody(code=long, message=long, field=long, stage=long, detail=long)
    assert len(codec.pack(clip_error(body))) < limits.MAX_PART
