import pytest

from steerpipe.core import errors
from steerpipe.core.errors import InputError, SteerpipeError

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SteerpipeError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_says_what_to_do(kind: type[SteerpipeError]) -> None:
    error = kind("the disk is full", fix="free 2 GiB")
    assert str(error) == "the disk is full\n  fix: free 2 GiB"
    assert kind.exit_status == (2 if issubclass(kind, InputError) else 1)
    with pytest.raises(TypeError):
        kind("the disk is full")  # type: ignore[call-arg]
    with pytest.raises(AssertionError, match="needs a fix"):
        kind("the disk is full", fix="")


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_in_the_tree_at_the_top_of_the_file(kind: type[SteerpipeError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
