"""A WebUI extension for tests/webui/test_neighbours.py that does what well-known extensions do around a generation.

Link this folder's parent into the WebUI's extensions folder beside OneDiff. The script takes one argument, a JSON
object: {"crops": [[width, height], ...]}, {"edit_at": step}, {"weight_of_lora": {step: weight}}, {"motion": true},
{"tiled_vae": true}; see Plan. POST /onediff-neighbours/v1/queue runs txt2img requests in a new thread, as Agent
Scheduler does; POST /onediff-neighbours/v1/edit changes weights in place, as SuperMerger does.
"""
from __future__ import annotations

import json
import threading
from collections.abc import Callable
from copy import copy
from typing import Any

import gradio as gr
import torch
from fastapi import Body, FastAPI
from modules import call_queue, script_callbacks, scripts, shared
from modules.api.api import Api
from modules.api.models import StableDiffusionTxt2ImgProcessingAPI
from modules.processing import Processed, StableDiffusionProcessingImg2Img, process_images
from PIL import Image
from torch import Tensor, nn

# Weights to edit: two that each call reads, and to_k, which is used through the cached keys of a prompt.
EDITED = (
    "input_blocks.1.0.in_layers.2.weight", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", "out.2.weight",
)


class Plan:
    """What to do in one generation, from a JSON object.

    crops: the sizes of nested inpaintings, as ADetailer makes one for each face.
    nested_scripts: whether these run all scripts; if not, none, as with ADetailer's "Apply only selected scripts".
    edit_at: the step before which weights are edited in place, until the end of the generation.
    weight_of_lora: the weight of all LoRAs from each of these steps on.
    motion: whether to put modules of an unknown class into the UNet's blocks.
    tiled_vae: whether to replace the decoder's forward, on its instance, by one that calls the earlier one for each
        tile.
    walked_vae: the same, by one that calls the decoder's layers itself.
    """

    def __init__(self, text: Any) -> None:
        given = json.loads(text or "{}")
        self.crops: list[list[int]] = given.get("crops", [])
        self.nested_scripts: bool = given.get("nested_scripts", False)
        self.edit_at: int | None = given.get("edit_at")
        self.weight_of_lora: dict[str, float] = given.get("weight_of_lora", {})
        self.motion: bool = given.get("motion", False)
        self.tiled_vae: bool = given.get("tiled_vae", False)
        self.walked_vae: bool = given.get("walked_vae", False)


class MotionModule(nn.Module):
    """In place of AnimateDiff's motion module: of a class that no UNet known to OneDiff has, it changes the image."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return 0.9 * x + 0.1 * x.mean(dim=(2, 3), keepdim=True)


def unet() -> Any:
    """The UNet of the loaded checkpoint. In A1111 the checkpoint has it directly, in the Forge family in a patcher."""
    objects = getattr(shared.sd_model, "forge_objects", None)
    return (objects.unet if objects else shared.sd_model).model.diffusion_model


class Edit:
    """Changes the weights of EDITED in place, and can restore their earlier values."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}

    @torch.inference_mode()  # Neo's parameters were made in it.
    def make(self, factor: float) -> None:
        weights = dict(unet().named_parameters())
        for name in EDITED:
            self._before.setdefault(name, weights[name].detach().clone())
            weights[name].mul_(factor)

    @torch.inference_mode()
    def undo(self) -> None:
        weights = dict(unet().named_parameters())
        for name, before in self._before.items():
            weights[name].copy_(before)
        self._before = {}


class TiledDecoder:
    """Replaces the decoder's forward as Tiled VAE does, and calls the earlier one for each of two tiles.

    walks: whether to call the decoder's layers itself instead.
    """

    def __init__(self, decoder: Any, walks: bool) -> None:
        self.decoder = decoder
        self.walks = walks
        if not hasattr(decoder, "original_forward"):
            decoder.original_forward = decoder.forward
        decoder.forward = self

    def __call__(self, z: Tensor) -> Tensor:
        if self.walks:
            return self.walk(z)
        middle = z.shape[3] // 2
        tiles = [self.decoder.original_forward(tile.contiguous()) for tile in (z[..., :middle], z[..., middle:])]
        return torch.cat(tiles, dim=3)

    def walk(self, z: Tensor) -> Tensor:
        net = self.decoder
        h = net.mid.block_2(net.mid.attn_1(net.mid.block_1(net.conv_in(z), None)), None)
        for level in reversed(net.up):
            for block in level.block:
                h = block(h, None)
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        return net.conv_out(nn.functional.silu(net.norm_out(h)))

    def remove(self) -> None:
        self.decoder.forward = self.decoder.original_forward


class Neighbours(scripts.Script):
    """A script that does in each generation what its argument, the text of a Plan, says."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def title(self) -> str:
        return "OneDiff neighbours"

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        return [gr.Textbox(value="", visible=False)]

    def before_process(self, p: Any, text: Any = "") -> None:
        self._finish()
        if getattr(p, "nested_by_neighbours", False):
            return
        plan = Plan(text)
        if plan.motion:
            self._insert()
        if plan.tiled_vae or plan.walked_vae:
            self._undo.append(TiledDecoder(p.sd_model.first_stage_model.decoder, plan.walked_vae).remove)
        if plan.edit_at is not None or plan.weight_of_lora:
            self._follow_steps(plan)

    def postprocess_image(self, p: Any, pp: Any, text: Any = "") -> None:
        plan = Plan(text)
        if getattr(p, "nested_by_neighbours", False) or not plan.crops:
            return
        # As ADetailer does: the other scripts' postprocess() before the nested generations, process() again after them.
        p.scripts.postprocess(copy(p), Processed(p, [], p.seed, ""))
        # Each starts from this same image, with OneDiff and without: a difference of 1/255 at the start would grow.
        start = Image.radial_gradient("L").resize(pp.image.size).convert("RGB")
        made = [inpainted(p, start, index, size, plan.nested_scripts) for index, size in enumerate(plan.crops)]
        pp.image = Image.new("RGB", (start.width * len(made), start.height))
        for index, image in enumerate(made):
            pp.image.paste(image, (start.width * index, 0))
        again = copy(p)
        p.scripts.before_process(again)
        p.scripts.process(again)

    def postprocess(self, p: Any, processed: Any, text: Any = "") -> None:
        if not getattr(p, "nested_by_neighbours", False):
            self._finish()

    def _finish(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _insert(self) -> None:
        for blocks, index in ((unet().input_blocks, 1), (unet().output_blocks, 2)):
            blocks[index].append(MotionModule())
            self._undo.append(lambda block=blocks[index]: block.__delitem__(-1))

    def _follow_steps(self, plan: Plan) -> None:
        edit = Edit()
        done: set[int] = set()

        def before_step(params: Any) -> None:
            step = params.sampling_step
            if step in done:
                return
            done.add(step)
            if step == plan.edit_at:
                edit.make(0.5)
            if str(step) in plan.weight_of_lora:
                weigh_loras(plan.weight_of_lora[str(step)])

        script_callbacks.on_cfg_denoiser(before_step)
        self._undo += [edit.undo, lambda: script_callbacks.remove_callbacks_for_function(before_step)]


def weigh_loras(weight: float) -> None:
    """Set the weight of all LoRAs of this generation from the next step on."""
    import networks

    if not hasattr(shared.sd_model, "forge_objects"):
        for network in networks.loaded_networks:
            network.unet_multiplier = weight
        return
    # The Forge family has merged them into the weights, and must merge them again, as at the start of a generation.
    from backend import memory_management

    names = [network.mentioned_name for network in networks.loaded_networks]
    networks.load_networks(names, [1.0] * len(names), [weight] * len(names))
    memory_management.load_models_gpu([shared.sd_model.forge_objects.unet])


def inpainted(p: Any, image: Image.Image, index: int, size: list[int], with_scripts: bool) -> Image.Image:
    """The image, in which a nested generation of this size has repainted a rectangle. index: moves the rectangle, the
    seed and the prompt."""
    nested = StableDiffusionProcessingImg2Img(
        init_images=[image], resize_mode=0, denoising_strength=0.5, mask=None, mask_blur=4, inpainting_fill=1,
        inpaint_full_res=True, inpaint_full_res_padding=8, inpainting_mask_invert=0, sd_model=p.sd_model,
        outpath_samples=p.outpath_samples, outpath_grids=p.outpath_grids, prompt=f"a face {index}",
        negative_prompt="rain", seed=p.seed + index, sampler_name=p.sampler_name, batch_size=1, n_iter=1, steps=2,
        cfg_scale=p.cfg_scale, width=size[0], height=size[1], do_not_save_samples=True, do_not_save_grid=True,
    )
    nested.cached_c = [None, None]
    nested.cached_uc = [None, None]
    # Before the scripts: they would set the seed and the steps to those of the page.
    nested.is_api = p.is_api
    nested.scripts, nested.script_args = copy(p.scripts), copy(p.script_args)
    if not with_scripts:
        # callback_map is the runner's cache of alwayson_scripts.
        nested.scripts.alwayson_scripts = []
        nested.scripts.callback_map = {}
    nested.nested_by_neighbours = True
    nested.image_mask = Image.new("L", image.size, 0)
    corner = (index * 8) % max(8, image.width // 2)
    nested.image_mask.paste(255, (corner, 8, corner + image.width // 2, image.height - 8))
    try:
        return process_images(nested).images[0]
    finally:
        nested.close()


def add_routes(demo: Any, app: FastAPI) -> None:
    # As Agent Scheduler does: an Api object whose routes no server serves.
    own = Api(FastAPI(), call_queue.queue_lock)
    edit = Edit()

    @app.post("/onediff-neighbours/v1/queue")
    def queue(requests: list[dict[str, Any]] = Body(embed=True)) -> list[Any]:  # noqa: B008
        answers: list[Any] = []

        def work() -> None:
            for request in requests:
                answer = own.text2imgapi(StableDiffusionTxt2ImgProcessingAPI(**request))
                answers.append({"images": answer.images, "parameters": answer.parameters, "info": answer.info})

        thread = threading.Thread(target=work, name="neighbours-queue")
        thread.start()
        thread.join()
        return answers

    @app.post("/onediff-neighbours/v1/edit")
    def change(factor: float | None = Body(None, embed=True)) -> None:
        with call_queue.queue_lock:
            if factor is None:
                edit.undo()
            else:
                edit.make(factor)


script_callbacks.on_app_started(add_routes)
