"""Classes and functions that differ from another in a few words of its source, which recognisers read."""

import inspect
import itertools
import linecache

_NUMBERS = itertools.count()


def variant(one, *changes: tuple[str, str]):
    """The class or function with words of its source replaced; they must be there."""
    source = inspect.getsource(one)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    file = f"<{one.__name__} {next(_NUMBERS)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = dict(getattr(one, "forward", one).__globals__)
    exec(compile(source, file, "exec"), names)
    return names[one.__name__]
