"""The standalone host's models: the small random ones, and what cannot be loaded."""
from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

pytest.importorskip("diffusers")

from tiny_model import tiny_sd15_pipeline, tiny_sdxl_pipeline

from lib_onediff.core.refusal import Refusal
from lib_onediff.demo.models import load_model
from lib_onediff.hosts.diffusers import model_folder as model_folder_module

UNET_WEIGHTS = Path("unet", "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in diffusers' layout."""
    folder = tmp_path_factory.mktemp("models") / "small-model"
    tiny_sd15_pipeline(seed=3).save_pretrained(folder)
    return folder


@pytest.fixture
def damaged_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(model_folder, tmp_path / "damaged-model"))


def assert_refused(model: Path, *parts: str) -> None:
    with pytest.raises(Refusal) as caught:
        load_model(str(model))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    for part in parts:
        assert part in sentence


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_models_name_is_one_line_that_no_console_obeys(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "a\x1b[31m\nb")
    assert load_model(str(folder)).name == "a?[31m?b"


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 4096, b'\x08\x00\x00\x00\x00\x00\x00\x00{"a":{}}'])
def test_corrupt_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    assert_refused(tmp_path / "broken.safetensors", "broken.safetensors")


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def test_checkpoint_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    file, witness = tmp_path / "pickled.ckpt", tmp_path / "witness"
    torch.save({"state_dict": Trap(witness)}, file)
    assert_refused(file, "pickled.ckpt")
    assert not witness.exists()


def test_folder_of_another_architecture(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    assert_refused(tmp_path, "no folder of Stable Diffusion 1.x, 2.x or XL", "it has no unet/, vae/, scheduler/.")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    # Not load_file: Windows writes no file of which a part lies in memory.
    tensors = load((folder / UNET_WEIGHTS).read_bytes())
    change(tensors)
    save_file(tensors, folder / UNET_WEIGHTS)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write(*path: str, text: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(*path).write_text(text, encoding="utf-8")


def write_over_tokenizer(folder: Path) -> None:
    """Its files are others with transformers 5."""
    for file in (folder / "tokenizer").iterdir():
        file.write_text("{", encoding="utf-8")


SCHEDULER, CONFIG = ("scheduler", "scheduler_config.json"), ("text_encoder", "config.json")
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / UNET_WEIGHTS).unlink(), "no weights of the unet"),
    "no configuration": (lambda folder: (folder / "unet" / "config.json").unlink(), "config.json"),
    "a weight left out": (
        lambda folder: change_weights(folder, lambda weights: weights.pop("conv_in.weight")), "conv_in.weight",
    ),
    "another shape": (
        lambda folder: change_weights(folder, lambda weights: weights.update({"conv_in.weight": torch.zeros(1, 1, 1)})),
        "conv_in.weight",
    ),
    "a file cut off": (lambda folder: cut_off(folder / UNET_WEIGHTS), "diffusion_pytorch_model.safetensors"),
    "a broken tokenizer": (write_over_tokenizer, "damaged-model"),
    "no tokenizer": (lambda folder: [file.unlink() for file in (folder / "tokenizer").iterdir()], "vocab.json"),
    "another class for a scheduler": (
        write(*SCHEDULER, text='{"_class_name": "UNet2DConditionModel"}'), "does not know the scheduler",
    ),
    "code for a scheduler": (
        write(*SCHEDULER, text='{"_class_name": ["os", "system"]}'), "does not know the scheduler",
    ),
    "no scheduler": (write(*SCHEDULER, text="{}"), "does not know the scheduler"),
    # transformers would load the model that it names.
    "an adapter": (
        write("text_encoder", "adapter_config.json", text='{"base_model_name_or_path": "/other"}'), "brings an adapter",
    ),
    **{f"{text[:8]} for a configuration": (write(*CONFIG, text=text), "config.json in text_encoder")
       for text in ("[" * 100_000, "\ufeff{}", '"text"', "null")},
}


@pytest.mark.parametrize(("damage", "part"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused_in_one_sentence(damaged_folder: Path, damage: Any, part: str) -> None:
    damage(damaged_folder)
    assert_refused(damaged_folder, part)


# --- what a folder may name -------------------------------------------------------------------------------------------


PYTHON = """from pathlib import Path
Path({witness!r}).touch()
"""


PYTHON_FILES = (
    "own.py", "unet/own.py", "None.py", "vae/diffusers.py", "text_encoder/transformers.PY",
    "unet/diffusers/__init__.py", "scheduler/diffusers.pyc", f"vae/diffusers{EXTENSION_SUFFIXES[-1]}",
)


def bring_python(folder: Path, file: str, witness: Path) -> None:
    """A file of Python in a model folder, and what exists once that file has run."""
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(PYTHON.format(witness=str(witness)))


@pytest.mark.parametrize("file", PYTHON_FILES)
def test_folder_that_brings_python_is_not_loaded(damaged_folder: Path, tmp_path: Path, file: str) -> None:
    bring_python(damaged_folder, file, tmp_path / "witness")
    assert_refused(damaged_folder, "brings Python code", "runs nothing that comes with a model")
    assert not (tmp_path / "witness").exists()


def test_nothing_imports_python_that_comes_after_the_check(
    damaged_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is not what keeps the code from running: nothing looks for it."""
    for file in PYTHON_FILES:
        bring_python(damaged_folder, file, tmp_path / "witness")
    monkeypatch.setattr(model_folder_module, "check_files", lambda folder: None)
    assert load_model(str(damaged_folder)).name == "damaged-model"
    assert not (tmp_path / "witness").exists()


def test_pickled_weights_in_a_folder_are_not_opened(damaged_folder: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.ckpt"):
        torch.save({"state_dict": Trap(witness)}, damaged_folder / "unet" / name)
    assert load_model(str(damaged_folder)).name == "damaged-model"
    (damaged_folder / UNET_WEIGHTS).unlink()
    assert_refused(damaged_folder, "no weights of the unet as .safetensors")
    assert not witness.exists()


def test_weights_in_parts_and_in_float16_are_read(model_folder: Path, damaged_folder: Path) -> None:
    """As large models and variants have them; an old VAE's attention has other names."""
    saved = load_model(str(model_folder)).pipeline
    vae = load_file(model_folder / "vae" / UNET_WEIGHTS.name)
    (damaged_folder / UNET_WEIGHTS).unlink()
    saved.unet.save_pretrained(damaged_folder / "unet", max_shard_size="500KB")
    assert len(list((damaged_folder / "unet").glob("*.safetensors"))) > 1
    (damaged_folder / "vae" / UNET_WEIGHTS.name).unlink()
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {re.sub("to_q|to_k|to_v|to_out.0", lambda found: older[found[0]], name): weight.half()
               for name, weight in vae.items()}
    assert set(renamed) != set(vae)
    save_file(renamed, damaged_folder / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    loaded = load_model(str(damaged_folder)).pipeline
    assert same_weights(loaded.unet, saved.unet.state_dict())
    assert same_weights(loaded.vae, {name: weight.half().float() for name, weight in saved.vae.state_dict().items()})


def same_weights(network: Any, expected: dict[str, torch.Tensor]) -> bool:
    found = network.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("build", [tiny_sd15_pipeline, tiny_sdxl_pipeline])
def test_our_loader_reads_what_diffusers_own_does(build: Any, tmp_path: Path) -> None:
    import diffusers

    build().save_pretrained(tmp_path / "model")
    kind = getattr(diffusers, type(build()).__name__)
    expected, loaded = kind.from_pretrained(tmp_path / "model"), load_model(str(tmp_path / "model")).pipeline
    for name, part in expected.components.items():
        ours = loaded.components[name]
        assert type(ours) is type(part), name
        if isinstance(part, torch.nn.Module):
            assert same_weights(ours, part.state_dict()) and not ours.training, name
            assert {name: buffer.tolist() for name, buffer in ours.named_buffers()} == {
                name: buffer.tolist() for name, buffer in part.named_buffers()}
        elif hasattr(part, "bos_token_id"):
            text = "An owl, 2 rockets!"
            options = {"padding": "max_length", "max_length": part.model_max_length, "truncation": True}
            assert ours(text, **options).input_ids == part(text, **options).input_ids
            assert ours.model_max_length == part.model_max_length
        elif part is not None:
            assert dict(ours.config) == {**part.config, "_class_name": type(ours).__name__}


@pytest.mark.parametrize("index", [
    '{"unet": ["os", "system"], "_class_name": "own"}', '{"scheduler": ["subprocess", "Popen"]}', "[" * 100_000, "NaN",
])
def test_an_index_has_no_say(damaged_folder: Path, index: str) -> None:
    (damaged_folder / "model_index.json").write_text(index)
    assert type(load_model(str(damaged_folder)).pipeline).__name__ == "StableDiffusionPipeline"


@pytest.mark.parametrize("linked", [UNET_WEIGHTS, Path("unet"), Path("unet", "config.json"), Path("notes")])
def test_folder_with_a_link_that_leaves_it_is_refused(
    model_folder: Path, damaged_folder: Path, linked: Path, link: Callable[[Path, Path], None]
) -> None:
    place = damaged_folder / linked
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    link(place, model_folder / linked if (model_folder / linked).exists() else model_folder.parent)
    assert_refused(damaged_folder, "link", linked.parts[0])


def test_folder_of_a_hugging_face_cache_is_loaded(
    damaged_folder: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    cache = tmp_path / "models--one--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = Path(shutil.copytree(damaged_folder, cache / "snapshots" / "abc"))
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        blob = file.rename(cache / "blobs" / str(number))
        link(file, blob)
    assert load_model(str(snapshot)).name == "abc"
    link(snapshot / "unet" / "more", damaged_folder / "unet")
    assert_refused(snapshot, "link")
