"""Which settings apply while one generation runs inside another, as with ADetailer."""
from __future__ import annotations

from copy import copy

from lib_onediff.core.settings import Settings
from lib_onediff.runtime.generations import Generations

ON = Settings()
OFF = Settings(enabled=False)


class P:
    """The processing object that identifies a WebUI's generation."""


def is_on(generations: Generations) -> bool:
    innermost = generations.innermost
    return innermost is None or innermost.settings.enabled


def test_after_a_nested_generation_with_its_own_settings_those_of_the_outer_one_apply_again() -> None:
    """The outer generation is off with a reason, the inner one on. The end leaves no attribute on the processing
    object."""
    generations = Generations()
    outer = P()
    inner = P()
    generations.begin(outer, OFF, "Not today.")
    assert not is_on(generations) and generations.innermost.why_off == "Not today."
    generations.begin(inner, ON)
    assert is_on(generations)
    generations.end(inner)
    assert not is_on(generations)
    generations.end(outer)
    assert is_on(generations) and not outer.__dict__


def test_copying_a_running_generation_neither_ends_it_nor_begins_a_second() -> None:
    """ADetailer copies the processing object, and announces the beginning and end of generations with the copies. While
    the original's generation runs, these have no effect. After its end, a copy can begin a generation."""
    generations = Generations()
    p = P()
    generations.begin(p, OFF)
    generations.end(copy(p))
    assert not is_on(generations)
    generations.begin(copy(p), OFF)
    assert not is_on(generations)
    other = copy(p)
    generations.end(p)
    assert is_on(generations)
    generations.begin(other, OFF)
    assert not is_on(generations)
    generations.end(other)
    assert is_on(generations)


def test_a_failed_generation_ends_when_the_webui_drops_its_processing_object() -> None:
    """After an exception, no WebUI announces a generation's end."""
    generations = Generations()
    outer = P()
    inner = P()
    generations.begin(outer, ON)
    generations.begin(inner, OFF)
    del inner
    assert is_on(generations)
    del outer
    assert generations.innermost is None
