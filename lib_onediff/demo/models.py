"""Loads the demo's model: a diffusers folder, a single checkpoint file of Stable Diffusion 1.x, 2.x or XL, or one of
the two models that ship with OneDiff. Downloads nothing."""
from __future__ import annotations

import json
import logging
import re
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.logs import one_line, readable
from ..core.refusal import Refusal
from ..hosts.diffusers.model_files import Shapes, read_shapes, read_text
from ..hosts.diffusers.model_folder import load_folder
from ..hosts.diffusers.tokenizer import MERGES, VOCABULARY, write_words
from . import EMOJI_DIT, SHIPPED, SHIPPED_CFG_SCALE
from .command_line import model_location

log = logging.getLogger("onediff")

CONFIGS = Path(__file__).with_name("checkpoint_configs.json")
# Tensors that every checkpoint has which contains a UNet, and a VAE.
UNET_SIGN = "model.diffusion_model.input_blocks.0.0.weight"
VAE_SIGN = "first_stage_model.decoder.conv_in.weight"
# The family of a checkpoint, by a weight of the text encoder that only this family has.
FAMILY_SIGNS = {
    "conditioner.embedders.1.model.token_embedding.weight": "sdxl",
    "cond_stage_model.model.token_embedding.weight": "sd2",
    "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": "sd1",
}
# A line of a .yaml file that says that the model predicts v. \s instead of [ \t] would match line breaks too, and take
# quadratic time in a file of empty lines.
V_IN_YAML = re.compile(r'^[ \t]*parameterization:[ \t]*"?v"?[ \t]*(#.*)?$', re.MULTILINE)
# In bytes.
LARGEST_YAML = 1 << 20
# Repositories of the Hugging Face cache that may have CLIP's tokenizer.
CACHED = ("openai/clip-vit-large-patch14",)
ABOUT_SHIPPED = (
    "Draws emoji: try “a red apple on a blue background” or “an owl and a rocket”. "
    "Start with --model FILE_OR_FOLDER for your own."
)
ABOUT_TRANSFORMER = f"{ABOUT_SHIPPED} It is a transformer."
# emoji-dit's LoadedModel.steps.
TRANSFORMER_STEPS = 32
# The input channels of a UNet that needs no mask.
LATENT_CHANNELS = 4
# The pixels of an image's side for each number of a latent's side.
LATENT_PIXEL = 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16 if torch.cuda.is_available() else torch.float32


@dataclass(eq=False)
class LoadedModel:
    """A loaded diffusers pipeline and the model's name. Scripts see this object as shared.sd_model.

    about: how to use the model, for users; "" for a model that the user has chosen.
    steps, cfg_scale: the page's values at the start. The models that ship with OneDiff need a lower CFG scale than
        Stable Diffusion.
    """

    pipeline: Any
    name: str
    about: str = ""
    steps: int = 20
    cfg_scale: float = 7.0

    @property
    def unet(self) -> Any:
        """The denoising network: a UNet2DConditionModel, or a transformer (see is_unet)."""
        return self.pipeline.unet if self.is_unet else self.pipeline.transformer

    @property
    def is_unet(self) -> bool:
        """Whether the network is a UNet."""
        return hasattr(self.pipeline, "unet")

    @property
    def side_step(self) -> int:
        """The width and height of images must be multiples of this number of pixels."""
        return LATENT_PIXEL if self.is_unet else int(self.pipeline.side_step)

    @property
    def side(self) -> int:
        """The width and height in pixels that the model was trained for."""
        if not self.is_unet:
            return int(self.pipeline.default_side)
        size = self.unet.config.sample_size
        latent = max(size) if isinstance(size, (list, tuple)) else size
        return latent * 2 ** (len(self.pipeline.vae.config.block_out_channels) - 1)

    @cached_property
    def text_pipeline(self) -> Any:
        """A text-to-image pipeline with the networks of `pipeline`, which may be for another task. It is a second
        object, so that it can have another scheduler. Raises Refusal, for users, if the UNet needs a mask
        (inpainting)."""
        import diffusers

        if not self.is_unet:
            return type(self.pipeline)(**self.pipeline.components)
        if self.unet.config.in_channels != LATENT_CHANNELS:
            raise Refusal(f"{self.name} is an inpainting model: it needs a mask, which this page does not take.")
        return diffusers.AutoPipelineForText2Image.from_pipe(self.pipeline)

    def decode(self, latents: Tensor) -> Tensor:
        """The images of latents as a pipeline returns them with output_type "latent": (batch, 3, height, width) from 0
        to 1 in float32 on the CPU, decoded one by one.

        Converts a VAE with force_upcast, such as SDXL's, to float32 for good, because it overflows in float16.
        """
        vae = self.pipeline.vae
        if vae.config.force_upcast:
            vae.to(torch.float32)
        latents = latents.to(vae.dtype) / vae.config.scaling_factor
        mean = getattr(vae.config, "latents_mean", None)
        deviation = getattr(vae.config, "latents_std", None)
        if mean is not None and deviation is not None:
            deviation, mean = (latents.new_tensor(values).view(1, -1, 1, 1) for values in (deviation, mean))
            latents = latents * deviation + mean
        decoded = torch.cat([vae.decode(latent[None]).sample for latent in latents])
        return (decoded.float().cpu() / 2 + 0.5).clamp(0, 1)


def load_model(path: str | None) -> LoadedModel:
    """The model of a file or folder, loaded onto DEVICE in DTYPE. path: "emoji-dit" for the transformer that ships with
    OneDiff; None for emoji-sd. Raises Refusal, for users, if there is no such file, it cannot be loaded, or it is a
    refiner."""
    from diffusers.utils.logging import disable_progress_bar

    if path == EMOJI_DIT.name:
        from .flow_pipeline import load_emoji_dit

        disable_progress_bar()
        pipeline = load_emoji_dit(DTYPE).to(DEVICE)
        return LoadedModel(pipeline, EMOJI_DIT.name, ABOUT_TRANSFORMER, TRANSFORMER_STEPS, SHIPPED_CFG_SCALE)
    location = SHIPPED if path is None else model_location(path)
    is_folder = location.is_dir()
    disable_progress_bar()
    try:
        pipeline = (load_folder if is_folder else load_checkpoint)(location, DTYPE).to(DEVICE, DTYPE)
    except (Refusal, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Loaders raise dozens of classes for damaged files. A panic of a Rust library is a BaseException.
        said = " ".join(str(error).replace(str(location), location.name).split())
        first_sentence = said.partition(". ")[0] or type(error).__name__
        cause = textwrap.shorten(first_sentence, 200, placeholder=" ...").rstrip(".")
        raise Refusal(readable(f"The model {location.name} cannot be loaded; it may be damaged ({cause}).")) from error
    if pipeline.text_encoder is None:
        raise Refusal(f"The model {location.name} is a refiner: it needs an image, which this page does not take.")
    name = location.resolve().name if is_folder else location.stem
    if path is None:
        return LoadedModel(pipeline, one_line(name), ABOUT_SHIPPED, cfg_scale=SHIPPED_CFG_SCALE)
    return LoadedModel(pipeline, one_line(name))


# --- a single file ----------------------------------------------------------------------------------------------------


def load_checkpoint(path: Path, dtype: torch.dtype) -> Any:
    """The diffusers pipeline of a single checkpoint file of Stable Diffusion 1.x, 2.x or XL, on the CPU. Raises
    Refusal, for users, for any other file, and if no tokenizer is found; for a damaged file, any exception of
    diffusers."""
    import diffusers

    shapes = read_shapes(path)
    family = family_of(path, shapes)
    configs = json.loads(CONFIGS.read_text(encoding="utf-8"))[family]
    configs["unet/config.json"]["in_channels"] = shapes[UNET_SIGN][1]
    # The weights do not show whether a model predicts v. As in A1111, a .yaml file beside the checkpoint says it.
    # Without one, XL checkpoints have a tensor v_pred, and Stable Diffusion 2 is assumed to predict v.
    predicts_v = "v_pred" in shapes or family == "sd2"
    original = path.with_suffix(".yaml")
    if original.exists():
        predicts_v = V_IN_YAML.search(read_text(original, LARGEST_YAML, errors="replace")) is not None
    configs["scheduler/scheduler_config.json"]["prediction_type"] = "v_prediction" if predicts_v else "epsilon"
    kind = configs["model_index.json"]["_class_name"]
    with tempfile.TemporaryDirectory(prefix="onediff-config-") as folder:
        for name, config in configs.items():
            file = Path(folder, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(config), encoding="utf-8")
            if file.name == "tokenizer_config.json":
                copy_vocabulary(path, file.parent)
        options = {} if "XL" in kind else {"safety_checker": None}
        return getattr(diffusers, kind).from_single_file(
            str(path), config=folder, local_files_only=True, torch_dtype=dtype, **options
        )


def family_of(path: Path, shapes: Shapes) -> str:
    """The family of a checkpoint: "sd1", "sd2" or "sdxl". Raises Refusal, for users, unless it has a UNet, a VAE and a
    text encoder. shapes: of its tensors, by name; path: for the message."""
    family = next((family for sign, family in FAMILY_SIGNS.items() if sign in shapes), None)
    missing = {"UNet": UNET_SIGN not in shapes, "VAE": VAE_SIGN not in shapes, "text encoder": family is None}
    if family is None or any(missing.values()):
        raise Refusal(
            f"{path.name} is not a checkpoint of Stable Diffusion 1.x, 2.x or XL: it has no "
            f"{' and no '.join(part for part, lacking in missing.items() if lacking)} of such a model."
        )
    return family


def copy_vocabulary(checkpoint: Path, folder: Path) -> None:
    """Copy the vocabulary files of CLIP's tokenizer into `folder`, from a folder beside the checkpoint or from the
    Hugging Face cache. Raises Refusal, which tells users where to put the files, if neither has them."""
    parent = checkpoint.resolve().parent
    for found_in in (parent / "tokenizer", parent / checkpoint.stem / "tokenizer", *cached_tokenizers()):
        if (found_in / VOCABULARY).exists() and (found_in / MERGES).exists():
            write_words(found_in, folder)
            return
    raise Refusal(
        f"{checkpoint.name} has no tokenizer, and CLIP's was not found on this machine. Put a folder named tokenizer "
        "with vocab.json and merges.txt beside it (every Stable Diffusion folder in diffusers' layout has one)."
    )


def cached_tokenizers() -> Iterator[Path]:
    """The folders of CLIP's tokenizer in the Hugging Face cache; none if it was never downloaded there."""
    from transformers.utils import cached_file

    for name in CACHED:
        try:
            yield Path(cached_file(name, VOCABULARY, local_files_only=True) or "").parent
        except Exception:
            # Which exception is raised if there is none depends on other installed packages.
            log.debug("no tokenizer in %s", name, exc_info=True)
