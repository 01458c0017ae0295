"""Models outside Python: ONNX files, programs of `torch.export`, and bundles for a browser."""

from flowdup.export.bundle import export_bundle
from flowdup.export.models import FORMATS, export_model

__all__ = ["FORMATS", "export_bundle", "export_model"]
