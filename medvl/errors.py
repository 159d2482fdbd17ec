"""What can go wrong, as types.

Every error that medvl raises on bad input is a `MedvlError`. Its text says three things: which file or field, what is
wrong with it, and what to do about it. It never quotes a header value or a line of a report: those may name a patient.
"""


class MedvlError(Exception):
    """Base of all errors that medvl raises on purpose."""


class DicomError(MedvlError):
    """A DICOM file cannot be read as an image. `reason` is a short word for counting: "truncated", "no_pixels", ..."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["DicomError"], tuple[str, str]]:  # crosses process borders whole
        return type(self), (str(self), self.reason)


class ImageError(MedvlError):
    """A JPEG or PNG cannot be read. `reason` as in `DicomError`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["ImageError"], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class ReportError(MedvlError):
    """A report file cannot be read as text."""


class CorpusError(MedvlError):
    """A corpus on disk does not have the layout, the columns or the values that its data card describes."""


class SplitError(MedvlError):
    """A patient (or an article) stands in more than one split, or two manifests that must be disjoint are not."""


class ShardError(MedvlError):
    """A shard, its index or its manifest is missing, damaged, or does not belong with the others."""


class LoaderError(MedvlError):
    """A loader's worker process died, or has given nothing for too long."""


class BudgetError(MedvlError):
    """More bad inputs were skipped than the budget allows."""


class ConfigError(MedvlError):
    """A setting is unknown, out of range, or does not go with another one."""


class CheckpointError(MedvlError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the model."""


class WeightsError(MedvlError):
    """Pretrained weights cannot be had or do not fit: the text names the first differing keys."""


class TrainingError(MedvlError):
    """Training cannot go on: non-finite losses over budget, ranks that disagree, a lock held by another run."""


class EvaluationError(MedvlError):
    """An evaluator was given labels, scores or prompts that it cannot judge."""
