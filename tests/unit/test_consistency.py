"""The consistency report: what it tells, and reading it back."""
from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib_onediff import __version__
from lib_onediff.consistency import differences, machine_facts, onediff_facts, parse, report
from lib_onediff.consistency.facts import read_switch
from lib_onediff.consistency.report import (
    CHANGES_DIGITS,
    CHANGES_IMAGES,
    CHANGES_NOTHING,
    LONGEST_VALUE,
    NAMES_OF_IMAGES,
    NAMES_OF_NOTHING,
    as_fact,
    as_words,
)
from lib_onediff.hosts.host_facts import host_facts
from lib_onediff.options.settings import Settings
from lib_onediff.store.machine import source_digest

STATUS = {"backend": "eager", "route": "plain", "model": "SD1"}
NAMES = st.text("abc XYZ.12", min_size=1, max_size=8).map(lambda text: " ".join(text.split())).filter(bool)
VALUES = st.one_of(
    st.text(max_size=20), st.text("/\\ \n:[]>", max_size=8), st.booleans(), st.none(), st.integers(),
    st.floats(allow_nan=False),
)


def test_everything_of_this_machine_is_read_back() -> None:
    facts = {**machine_facts(), **onediff_facts(Settings(), STATUS, {"attention": {"512": "flash"}})}
    assert parse(report(facts)) == facts
    software = facts["Software"]
    assert software["torch"] == torch.__version__ and software["OneDiff"] == f"{__version__} {source_digest()}"
    assert facts["OneDiff"]["Backend in use"] == "eager"
    quoted = "\n".join(f"> {line}" for line in report(facts).splitlines())
    assert parse(f"Hello,\nhere it is:\n{quoted}\n") == facts


@pytest.mark.parametrize(("error", "said"), [
    (AttributeError("Unknown attribute allow_fp16_accumulation"), "not known to this torch"),
    (AssertionError("Unknown attribute allow_fp16_accumulation"), "not known to this torch"),
    (AssertionError("Torch not compiled with CUDA enabled"), "not to be read"),
    (RuntimeError("mixed"), "not to be read"),
])
def test_a_switch_that_cannot_be_read(error: Exception, said: str) -> None:
    def read() -> None:
        raise error

    assert read_switch(read) == said


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), max_size=4))
def test_any_facts_are_read_back(values: dict) -> None:
    for written in (as_fact, as_words):
        facts = {
            section: {name: written(value) for name, value in named.items()} for section, named in values.items()
        }
        assert parse(report(facts)) == facts


def test_the_first_lines_never_change() -> None:
    """Other machines run other versions."""
    assert report({"Machine": {"GPU": "X"}}) == "OneDiff consistency report, format 1\n[Machine]\nGPU: X"


@pytest.mark.parametrize("switch, name, values", [
    ("matmul.allow_tf32", "TF32 in products", (True, False)),
    ("matmul.allow_fp16_reduced_precision_reduction", "fp16 reduced precision reduction", (True, False)),
    ("matmul.allow_bf16_reduced_precision_reduction", "bf16 reduced precision reduction", (True, False)),
])
def test_switches_of_torch_are_told(switch: str, name: str, values: tuple) -> None:
    holder, attribute = torch.backends.cuda.matmul, switch.split(".")[1]
    before = getattr(holder, attribute)
    try:
        for value in values:
            setattr(holder, attribute, value)
            assert machine_facts()["PyTorch"][name] == {True: "on", False: "off"}[value]
    finally:
        setattr(holder, attribute, before)


def test_attention_and_cudnn_switches_are_told() -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_flash_sdp(False)
        told = machine_facts()["PyTorch"]
        assert (told["cuDNN benchmark"], told["Flash attention"]) == ("on", "off")
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.backends.cuda.enable_flash_sdp(before[1])


def test_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("HOME_OF_A_SECRET", "hunter2")
    told = report(machine_facts())
    assert "NVIDIA_TF32_OVERRIDE: 0" in told and "hunter2" not in told


def test_no_path_is_told() -> None:
    facts = onediff_facts(Settings(prewarm="512x512"), STATUS, {})
    told = report({**machine_facts(), **facts})
    assert "somebody" not in told and str(Path.home()) not in told
    for path in ("/home/somebody/model.pt", r"C:\Users\somebody\model.pt", "~/models/model.pt"):
        assert as_fact(path) == "model.pt"
    assert as_fact("a\nb:  c") == "a b: c" and len(as_fact("x" * 500)) == LONGEST_VALUE


def test_every_setting_is_told() -> None:
    told = onediff_facts(Settings(backend="eager"), STATUS, {})["OneDiff settings"]
    assert set(told) == {option.name for option in fields(Settings)}
    assert (told["backend"], told["low_bit_only"], told["prewarm"]) == ("eager", "off", "none")


def test_tuned_choices_have_a_digest() -> None:
    def told(choices: dict) -> str:
        return onediff_facts(Settings(), STATUS, choices)["OneDiff"]["Tuned choices"]

    assert told({"tile": 64, "compiled code a": "of this machine"}) == told({"tile": 64})

    assert told({}) == "none"
    assert told({"a": 1, "b": [2]}) == told({"b": [2], "a": 1}) != told({"a": 1, "b": [3]})
    assert told({"a": 1, "b": [2]}).startswith("2, ")


def test_differences_are_lines_for_people() -> None:
    mine = {"Machine": {"GPU": "A", "Driver": "1"}, "Extra": {"Only": "here"}}
    theirs = {"Machine": {"GPU": "B", "Driver": "1", "Fan": "off"}, "Other": {"Only": "there"}}
    assert [line.text for line in differences(mine, theirs)] == [
        "Machine, GPU: here A, there B", "Machine, Fan: here not told, there off",
        "Extra, Only: here here, there not told", "Other, Only: here not told, there there",
    ]
    assert differences(mine, mine) == []


def test_differences_that_change_images_come_first() -> None:
    mine = {
        "Machine": {"System": "Linux", "GPU": "A"}, "Model": {"Checkpoint": "a"},
        "OneDiff settings": {"deepcache_interval": "1", "prewarm": "none"},
    }
    theirs = {
        "Machine": {"System": "Windows", "GPU": "B"}, "Model": {"Checkpoint": "b"},
        "OneDiff settings": {"deepcache_interval": "2", "prewarm": "64x64"},
    }
    assert [(line.rank, line.text.partition(":")[0]) for line in differences(mine, theirs)] == [
        (CHANGES_IMAGES, "Model, Checkpoint"), (CHANGES_IMAGES, "OneDiff settings, deepcache_interval"),
        (CHANGES_DIGITS, "Machine, GPU"), (CHANGES_NOTHING, "Machine, System"),
        (CHANGES_NOTHING, "OneDiff settings, prewarm"),
    ]


def test_every_option_has_a_rank() -> None:
    known = {option.name for option in fields(Settings)}
    assert {name for name in NAMES_OF_IMAGES | NAMES_OF_NOTHING if name.islower()} <= known


@pytest.mark.parametrize("text, part", [
    ("", "no consistency report"), ("hello", "no consistency report"), ("[Machine]\nGPU: A", "no consistency report"),
    ("OneDiff consistency report, format 2\n[Machine]", "newer OneDiff"),
])
def test_another_text_gets_a_sentence(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse(text)


def test_facts_of_a_webui(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, where they are there; a file is named without its folder."""
    modules = ModuleType("modules")
    modules.shared = SimpleNamespace(
        cmd_opts=SimpleNamespace(no_half=True, precision="full", api_auth="me:secret", ckpt_dir="/home/somebody"),
        opts=SimpleNamespace(upcast_attn=True, sd_vae="a/b.safetensors", outdir_samples="/home/somebody", s_churn=0.5),
    )
    loaded = SimpleNamespace(sd_checkpoint_info=SimpleNamespace(name_for_extra="sub/model"), sd_model_hash="abc")
    modules.sd_models = SimpleNamespace(model_data=SimpleNamespace(sd_model=loaded))
    monkeypatch.setitem(sys.modules, "modules", modules)
    for name in ("shared", "sd_models"):
        monkeypatch.setitem(sys.modules, f"modules.{name}", getattr(modules, name))
    hijack = SimpleNamespace(model_hijack=SimpleNamespace(optimization_method="sdp"))
    monkeypatch.setitem(sys.modules, "modules.sd_hijack", hijack)
    monkeypatch.setitem(sys.modules, "modules.devices", SimpleNamespace(dtype=torch.float32, dtype_vae=torch.bfloat16))
    facts = host_facts("a1111")
    assert facts["WebUI"] == {
        "Name": "a1111", "Version": "none", "Attention": "sdp", "Type": "float32", "Type of the VAE": "bfloat16",
    }
    assert facts["WebUI flags"] == {"precision": "full", "no_half": "on"}
    assert facts["WebUI options"] == {"upcast_attn": "on", "sd_vae": "b.safetensors", "s_churn": "0.5"}
    assert facts["Model"] == {"Checkpoint": "model", "Hash": "abc"}
    assert "secret" not in report(facts) and "somebody" not in report(facts)
