"""Error types.

Every error that medvl raises on bad input is a `MedvlError`. Its message names the file or the
field, the problem and a remedy. It never quotes a header value or a line of a report: those may
name a patient.

`code` is a short word for programs: to count errors, or to handle one kind. Codes in use:

| code | meaning |
|---|---|
| out_of_range | a value is outside its allowed range |
| unknown_name | no field, choice, system, preset or command has this name |
| wrong_type | a value has another type than the field |
| missing | something required was not given |
| conflict | two settings, or a setting and the model or data, exclude each other |
| unsupported | valid, but not supported |
| not_found | a file, folder or key does not exist |
| exists | the output exists already and belongs to something else |
| in_use | another process holds the folder |
| unreadable | the operating system refuses to read or write |
| denied | a remote store refuses access or a request: credentials, their expiry, their rights |
| network | a remote store does not answer, or breaks off |
| truncated, malformed, undecodable | damaged: it ends early, breaks its format or its codec |
| too_large | over a limit of size, count or memory |
| mismatch | two things that must agree do not: a hash, a shape, a manifest, ranks |
| version | written by another version of medvl |
| leak | a patient or article is on both sides of a split |
| synthetic | generated images where real ones are needed |
| empty | nothing is left to work on |
| budget | more bad inputs than the budget allows |
| worker | a worker process died or hangs |
| nonfinite | a loss, gradient or weight is not finite |

Errors of a corpus's files have a few more, for counting: not_a_file (a folder, pipe, device or
socket) and outside_folder (a link out of the corpus); those of images also no_pixels, no_codec,
not_dicom, multi_frame, unknown_format, no_image, no_regions and too_small; those of volumes gap
(slices are missing), tilt and oblique (axes at an angle) and not_hu (no Hounsfield units).
"""

from typing import Any, Self

ERROR_CODES = "MEDVL_ERROR_CODES"
"""Variable of the environment: where it is set, commands print the code of an error behind its
message.
"""


class MedvlError(Exception):
    """Base of all errors that medvl raises on purpose.

    Attributes:
        code: short word for programs, from the table in `medvl.errors`.
        field: the setting, option, column or key that is wrong, as the user wrote it; None where
            there is none.
    """

    def __init__(self, message: str, code: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:  # code and field survive the way from a worker process
        return _rebuild, (type(self), str(self), self.code, self.field)

    def prefixed(self, prefix: str) -> Self:
        """Return the same error with `prefix` before its message, for example the file's path."""
        return type(self)(f"{prefix}{self}", self.code, field=self.field)


def _rebuild(cls: type[MedvlError], message: str, code: str, field: str | None) -> MedvlError:
    return cls(message, code, field=field)


class DicomError(MedvlError):
    """A DICOM file cannot be read as an image."""


class ImageError(MedvlError):
    """A JPEG or PNG file cannot be read."""


class VolumeError(MedvlError):
    """A NIfTI file or a DICOM series cannot be read as one volume."""


class ReportError(MedvlError):
    """A report file cannot be read as text."""


class CorpusError(MedvlError):
    """A corpus on disk does not have the layout, the columns or the values that its data card
    describes.
    """


class SplitError(MedvlError):
    """A patient (or an article) is in more than one split, two manifests share patients, or a
    test set is synthetic.
    """


class ShardError(MedvlError):
    """A shard, its index or its manifest is missing or damaged, or belongs to another
    conversion.
    """


class StorageError(MedvlError):
    """A remote store cannot be reached or refuses access, or holds other bytes than it should."""


class LoaderError(MedvlError):
    """A loader's worker process died, or returned nothing within the timeout."""


class BudgetError(MedvlError):
    """More bad inputs were skipped than the budget allows."""


class ConfigError(MedvlError):
    """A setting is unknown, out of range, or in conflict with another one."""


class CheckpointError(MedvlError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the model."""


class WeightsError(MedvlError):
    """Pretrained weights are not available, or do not fit the model; the message names the first
    differing keys.
    """


class TrainingError(MedvlError):
    """Training cannot continue: non-finite losses over budget, ranks that disagree, a folder
    locked by another run.
    """


class EvaluationError(MedvlError):
    """Labels, scores or prompts cannot be evaluated."""
