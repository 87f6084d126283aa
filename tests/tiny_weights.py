"""Random weights under which a UNet and a VAE still make images.

Untrained networks give grey or NaN after a few steps. Here a linear path runs through each of them beside the random
layers: the UNet predicts most of its own input as noise, so latents keep their scale, and the VAE carries colour down
and up again, so an image survives img2img. Every layer still contributes, so an error in any of them shows.

A value x travels in four channels, (x, -x, C, -C), that form one group of the group norms: the constant C dominates the
group's variance, which makes the norm a fixed factor, and silu(z) - silu(-z) = z undoes the activation.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS_PER_VALUE = 4
CONSTANT = 4.0
NOISE_SHARE = 1.05
RANDOM_SHARE = 0.35
IMAGE_TEXTURE = 0.12


@torch.no_grad()
def shape_unet(unet: Any) -> None:
    """Add the linear path to a diffusers UNet2DConditionModel whose group norms have groups of CHANNELS_PER_VALUE.

    Afterwards its output is about NOISE_SHARE * input + RANDOM_SHARE * (unit shapes that depend on every input).
    """
    strengthen_prompt(unet)
    strengthen_depth(unet)
    latent_channels = unet.config.out_channels
    carried = CHANNELS_PER_VALUE * latent_channels
    write_carriers(unet.conv_in, latent_channels)
    last_block = unet.up_blocks[-1]
    shortcut = last_block.resnets[-1].conv_shortcut
    pass_channels(shortcut, carried, start=shortcut.in_channels - unet.conv_in.out_channels)
    silence(last_block.resnets[-1].conv2, carried)
    for attention in getattr(last_block, "attentions", [])[-1:]:
        silence(attention.proj_out, carried)

    unet.conv_out.bias.zero_()
    unet.conv_out.weight[:, :carried] = 0
    random_weight = unet.conv_out.weight / two_digits(output_size(unet))
    linear_weight = read_carriers(unet.conv_out, torch.eye(latent_channels))
    unet.conv_out.weight.copy_(NOISE_SHARE * linear_weight + RANDOM_SHARE * random_weight)


@torch.no_grad()
def strengthen_prompt(unet: Any) -> None:
    """Make the text matter: sharper cross attention with a larger say in the residual stream."""
    for name, parameter in unet.named_parameters():
        if name.endswith(("attn2.to_q.weight", "attn2.to_k.weight")):
            parameter.mul_(4)
        elif name.endswith(("attn2.to_v.weight", "attn2.to_out.0.weight", "proj_out.weight")):
            parameter.mul_(2)


@torch.no_grad()
def strengthen_depth(unet: Any) -> None:
    """Favour large soft shapes over grain: what comes up from the small sizes outweighs the skips."""
    for block in unet.up_blocks:
        for resnet in block.resnets:
            deep_inputs = resnet.conv_shortcut.in_channels // 2
            resnet.conv_shortcut.weight[:, :deep_inputs] *= 4
    unet.conv_out.weight.copy_(unet.conv_out.weight.mean((2, 3), keepdim=True).expand_as(unet.conv_out.weight))


def output_size(unet: Any) -> float:
    """Standard deviation of the UNet's output on fixed random inputs."""
    generator = torch.Generator().manual_seed(99)
    latent = torch.randn(2, unet.config.in_channels, 16, 16, generator=generator)
    context = torch.randn(2, 77, unet.config.cross_attention_dim, generator=generator)
    added = None
    if unet.config.addition_embed_type == "text_time":
        ids = 6
        width = unet.config.projection_class_embeddings_input_dim - ids * unet.config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(2, width, generator=generator), "time_ids": torch.full((2, ids), 128.0)}
    steps = torch.tensor([801, 401])
    return unet(latent, steps, encoder_hidden_states=context, added_cond_kwargs=added).sample.std().item()


@torch.no_grad()
def shape_vae(vae: Any) -> None:
    """Add the linear paths to an AutoencoderKL of equal channels, group norms with groups of CHANNELS_PER_VALUE.

    Latents times the VAE's scaling factor then have about unit size, and decode(encode(image)) is a soft copy of it.
    """
    colours, latent_scale = colour_matrix(), vae.config.scaling_factor
    for coder, values, scale in ((vae.encoder, 3, 1.0), (vae.decoder, 4, latent_scale)):
        carry_through(coder, CHANNELS_PER_VALUE * values)
        write_carriers(coder.conv_in, values, scale)
    identity(vae.quant_conv)
    identity(vae.post_quant_conv)

    moments = vae.encoder.conv_out
    moments.weight.zero_()
    moments.bias.zero_()
    moments.weight[:4] = read_carriers(moments, colours / latent_scale)
    moments.bias[4:] = -12.0

    image = vae.decoder.conv_out
    image.bias.zero_()
    image.weight[:, : 4 * CHANNELS_PER_VALUE] = 0
    probe = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(98)) / latent_scale
    random_weight = image.weight / two_digits(vae.decode(probe).sample.std().item())
    image.weight.copy_(read_carriers(image, torch.linalg.pinv(colours)) + IMAGE_TEXTURE * random_weight)


def colour_matrix() -> Tensor:
    """(4, 3): how the demo's four latent channels carry red, green and blue; rgb of size 0.25 gives unit latents."""
    red_green_blue = torch.tensor(
        [[0.5, 0.5, 0.5], [0.7, 0.0, -0.7], [0.4, -0.8, 0.4], [0.1, 0.1, -0.1]],
    )
    return 4.0 * red_green_blue


def carry_through(coder: Any, carried: int) -> None:
    """Let the first channels pass an encoder or decoder untouched except for averaging where the size changes."""
    for module in coder.modules():
        kind = type(module).__name__
        if kind == "ResnetBlock2D":
            silence(module.conv2, carried)
        elif kind == "Attention":
            silence(module.to_out[0], carried)
        elif kind == "Downsample2D":
            pass_channels(module.conv, carried, kernel=torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]]) / 4)
        elif kind == "Upsample2D":
            pass_channels(module.conv, carried, kernel=torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16)


def write_carriers(conv: Any, values: int, scale: float = 1.0) -> None:
    """Make conv put its first input channels, times scale, into the channel groups that carry values."""
    carried = CHANNELS_PER_VALUE * values
    conv.weight[:carried] = 0
    conv.bias[:carried] = 0
    middle = conv.kernel_size[0] // 2
    for index in range(values):
        first = CHANNELS_PER_VALUE * index
        conv.weight[first, index, middle, middle] = scale
        conv.weight[first + 1, index, middle, middle] = -scale
        conv.bias[first + 2] = CONSTANT
        conv.bias[first + 3] = -CONSTANT


def read_carriers(conv: nn.Conv2d, matrix: Tensor) -> Tensor:
    """Weights like conv's that read the carried values after group norm and SiLU and multiply them by matrix.

    matrix: (outputs, values); the result has matrix.shape[0] output channels.
    """
    weight = torch.zeros(matrix.shape[0], *conv.weight.shape[1:])
    middle = conv.kernel_size[0] // 2
    undo_norm = CONSTANT / math.sqrt(2)
    for index in range(matrix.shape[1]):
        first = CHANNELS_PER_VALUE * index
        weight[:, first, middle, middle] = undo_norm * matrix[:, index]
        weight[:, first + 1, middle, middle] = -undo_norm * matrix[:, index]
    return weight


def pass_channels(conv: Any, carried: int, start: int = 0, kernel: Tensor | None = None) -> None:
    """Make the first output channels of conv copies of its input channels from start on, filtered by kernel."""
    silence(conv, carried)
    for index in range(carried):
        conv.weight[index, start + index] = torch.ones(1, 1) if kernel is None else kernel


def silence(layer: Any, carried: int) -> None:
    """Zero the first output channels of a convolution or linear layer."""
    layer.weight[:carried] = 0
    layer.bias[:carried] = 0


def identity(conv: Any) -> None:
    """Make a 1x1 convolution return its input."""
    conv.bias.zero_()
    conv.weight.copy_(torch.eye(conv.out_channels).view_as(conv.weight))


def two_digits(value: float) -> float:
    """value to two digits, so that rounding differences between machines do not reach the weights."""
    return float(f"{value:.2g}")
