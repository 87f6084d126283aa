"""A detector that finds three faces in every image, for ADetailer where mediapipe is not installed.

ADetailer imports mediapipe only when it detects, so everything around the detector is its own. It answers to the models
mediapipe_face_short and mediapipe_face_full.
"""
from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

# Left, top, width and height as parts of the image's; their areas tell them apart.
FACES = [(0.05, 0.05, 0.4, 0.4), (0.5, 0.1, 0.45, 0.8), (0.1, 0.6, 0.6, 0.2)]


class FaceDetection:
    def __init__(self, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> FaceDetection:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def process(self, image: Any) -> Any:
        names = ("xmin", "ymin", "width", "height")
        boxes = [SimpleNamespace(**dict(zip(names, face, strict=True))) for face in FACES]
        faces = [SimpleNamespace(location_data=SimpleNamespace(relative_bounding_box=box), score=0.9) for box in boxes]
        return SimpleNamespace(detections=faces)


if importlib.util.find_spec("mediapipe") is None:
    mediapipe: Any = ModuleType("mediapipe")
    mediapipe.solutions = SimpleNamespace(
        face_detection=SimpleNamespace(FaceDetection=FaceDetection),
        drawing_utils=SimpleNamespace(draw_detection=lambda image, detection: None),
    )
    sys.modules["mediapipe"] = mediapipe
