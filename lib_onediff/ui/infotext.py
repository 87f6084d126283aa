"""The options of a run as a text, in an image's infotext and in the accordion's box of extra options.

The text has "on" or "off", then the preset's name if that makes it shorter, then every option that differs from the
preset, separated by semicolons: "on; speed Balanced; backend eager". It has no comma and no colon, which WebUIs would
have to quote.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields, replace
from typing import Any

from ..core.settings import (
    BOOL_OF_WORD,
    WORD_OF_BOOL,
    Settings,
    allowed_values,
    did_you_mean,
    format_value,
    options_of_a_run,
    parse_value,
)
from .presets import AS_IN_SETTINGS, PRESETS, preset_of, with_preset

# The infotext's keys: of the options, and of the reason why a run was not made with the OneDiff options that it asked
# for. A client of the WebUI's API gets the reason only there.
KEY = "OneDiff"
PROBLEM = "OneDiff problem"
# The option that switches OneDiff on, and the word before a preset's name in a text.
SWITCH = "enabled"
SPEED = "speed"
# Values of the infotext's entry in place of "on", if OneDiff does not serve the model.
NOT_SERVED = "not accelerated"
VAE_ALONE = "only the VAE accelerated"
# A sentence of problem_of.
NO_SWITCH = "None of its OneDiff options are used, because they do not begin with on or off."
# Separates the parts of a text.
PARTS = re.compile(r"[;\n]")
# See paste_functions.
PasteFunction = Callable[[dict[str, Any]], "bool | str | None"]


def describe(
    settings: Settings, inactive: Collection[str] = (), is_served: bool = True, has_our_vae: bool = False,
    of_other_models: Collection[str] = (),
) -> str:
    """The value of the infotext's entry OneDiff, for a generation that was made with these settings: see the module. In
    place of "on", it begins with VAE_ALONE or NOT_SERVED if OneDiff does not serve the model.

    inactive: options that had no effect; they are left out, so that pasting sets their defaults.
    is_served: whether OneDiff serves the generation's model. If not, pasting its infotext sets nothing.
    has_our_vae: whether OneDiff has decoded the generation's images.
    of_other_models: options without effect on the generation's model. They are not written as single options, but the
        named preset may include them: pasted for the same model, they have no effect again.
    """
    word = WORD_OF_BOOL[settings.enabled]
    if settings.enabled and not is_served:
        word = VAE_ALONE if has_our_vae else NOT_SERVED
    defaults = Settings()
    preset, changes = shortest(replace(settings, **{name: getattr(defaults, name) for name in inactive}), defaults)
    words = [word] if preset == AS_IN_SETTINGS else [word, f"{SPEED} {preset}"]
    words += [change for change in changes if change.partition(" ")[0] not in of_other_models]
    return "; ".join(words)


def shortest(wanted: Settings, standing: Settings) -> tuple[str, list[str]]:
    """The shortest description of a run: a preset's name or AS_IN_SETTINGS, and the options that differ from it in
    words, such as "backend eager". A preset is chosen only if it saves more than one option. The switch `enabled` is
    left out. wanted: the run's settings. standing: the settings tab's, which AS_IN_SETTINGS means, and which a preset
    changes."""
    names = options_of_a_run().keys() - {SWITCH}

    def changes_from(base: Settings) -> list[str]:
        changed = wanted.changed_from(base)
        return [f"{name} {format_value(value)}" for name, value in changed.items() if name in names]

    best = AS_IN_SETTINGS
    changes = changes_from(standing)
    fewest = len(changes)
    for name in PRESETS:
        of_preset = changes_from(with_preset(standing, name))
        # The preset's name counts as one word too.
        if len(of_preset) + 1 < fewest:
            best = name
            changes = of_preset
            fewest = len(of_preset) + 1
    return best, changes


def names_by_label() -> dict[str, str]:
    """The names of a run's options, by the options' labels on the page; the labels are in lower case and without the
    part in brackets."""
    return {
        option.metadata["label"].partition(" (")[0].lower(): name for name, option in options_of_a_run().items()
    }


def words_in(text: str) -> dict[str, str]:
    """The values of the options in a text, as words, by the option's name. A preset ("speed Fast") adds all of its
    options; "on" or "off" alone is the value of SWITCH. Nothing is checked: unknown names and wrong values are returned
    as they are, an unknown preset as the value of SPEED, an option without a value as "".

    An option may be written by its name or by its label: "DeepCache interval 3". If an option is there twice, its last
    value counts.
    """
    words: dict[str, str] = {}
    labels = names_by_label()
    for written in PARTS.split(text):
        part = " ".join(re.sub("[=:]", " ", written).split())
        if not part:
            continue
        name, _, value = part.partition(" ")
        for label in labels:
            if f"{part.lower()} ".startswith(f"{label} "):
                name = labels[label]
                value = part[len(label):].strip()
        if name.lower() == SPEED:
            name = SPEED
            with contextlib.suppress(ValueError):
                words.update({option: format_value(of) for option, of in preset_of(value).all_values.items()})
                continue
        if part in BOOL_OF_WORD:
            words[SWITCH] = part
        else:
            words[name] = value
    return words


def read_changes(text: str) -> dict[str, Any]:
    """The values of the options in a text such as "deepcache_interval 3; vae_precision=fp16", by name and with the
    options' types; {} for an empty text. The text may be typed, or copied from infotext together with KEY.

    Raises ValueError with a sentence for each unknown option and wrong value.
    """
    options = options_of_a_run()
    found = {}
    problems = []
    for name, value in words_in(text.strip().removeprefix(f"{KEY}:").strip().strip('"')).items():
        try:
            found[name] = value_of(name, value, options)
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError(" ".join(problems))
    return found


def value_of(name: str, word: str, options: Mapping[str, Field[Any]]) -> Any:
    """The value that a word means for an option of a run, with the option's type. name: the option's name as words_in
    gives it, which may be unknown. options: those of a run, by name. Raises ValueError with a sentence for an unknown
    option or preset, for an option that is a setting only, and for a wrong value."""
    if name == SPEED:
        # words_in has replaced the presets that exist: this raises, with the names of those.
        preset_of(word)
    if name not in options:
        if any(option.name == name for option in fields(Settings)):
            raise ValueError(f"OneDiff option {name} cannot be set for a single image: use Settings > OneDiff.")
        raise ValueError(f"OneDiff has no option {name!r}.{did_you_mean(name, options)}")
    try:
        return parse_value(options[name], word)
    except ValueError:
        takes = allowed_values(options[name])
        if not word:
            raise ValueError(f"{name} needs a value: {takes}.") from None
        raise ValueError(f"{name} does not take {word!r}; it takes {takes}.") from None


def parse(text: Any) -> dict[str, Any]:
    """The values of the options in an infotext's entry OneDiff (text), by name and with the options' types; a preset's
    options are in place of its name. {} if the text has neither "on" nor "off", as for an image that OneDiff did not
    serve.

    Unknown options and wrong values are left out, since another version of OneDiff may have written the text;
    problem_of names them.
    """
    options = options_of_a_run()
    words = words_in(str(text))
    found: dict[str, Any] = {}
    for name in options.keys() & words.keys():
        with contextlib.suppress(ValueError):
            found[name] = parse_value(options[name], words[name])
    return found if SWITCH in found else {}


def problem_of(text: Any) -> str:
    """Sentences for the user on the parts of an infotext's entry OneDiff (text) that parse() leaves out: unknown
    options, wrong values, or all options; "" if it leaves out none, or the entry is empty, NOT_SERVED or VAE_ALONE."""
    written = str(text).strip()
    if written in ("", NOT_SERVED, VAE_ALONE):
        return ""
    problems = "" if parse(text) else NO_SWITCH
    try:
        read_changes(written)
    except ValueError as problem:
        problems = str(problem) if not problems else f"{problem} {problems}"
    return f"Not all of the pasted infotext is used. {problems}" if problems else ""


def paste_functions(
    standing: Callable[[], Settings], tell: Callable[[str], object],
) -> tuple[PasteFunction, PasteFunction, PasteFunction]:
    """Three functions that set the accordion's checkbox, list of presets and text of extra options from a pasted
    infotext. Each takes the infotext as the WebUI has parsed it, and returns the component's new value; None, which
    leaves the component as it is, if parse() gives {} for the entry OneDiff or there is no such entry.

    The next run then has the settings of the infotext. Options that have the same value in the settings tab are not
    written into the accordion, so that they go on following that tab. standing: returns the settings tab's settings.
    tell: called once per paste with the sentences of problem_of, if there are any.

    Call this once for all tabs: when an image is sent from one tab to another, WebUIs copy a component's value only if
    both tabs have the same function.
    """

    def pasting(value_of: Callable[[Settings], bool | str]) -> PasteFunction:
        """A function that sets a component. value_of: returns its value for the settings of the infotext."""

        def paste(parameters: dict[str, Any]) -> bool | str | None:
            """The component's new value, or None. parameters: the infotext as the WebUI has parsed it."""
            found = parse(parameters.get(KEY, ""))
            return value_of(replace(Settings(), **found)) if found else None

        return paste

    paste_switch = pasting(lambda wanted: wanted.enabled)

    def paste_first(parameters: dict[str, Any]) -> bool | str | None:
        # The WebUI calls all three functions. One of them reports the problem.
        problem = problem_of(parameters.get(KEY, ""))
        if problem:
            tell(problem)
        return paste_switch(parameters)

    return (
        paste_first, pasting(lambda wanted: shortest(wanted, standing())[0]),
        pasting(lambda wanted: "; ".join(shortest(wanted, standing())[1])),
    )
