"""The names of evaluations.

An evaluation registers itself when its module is imported:

    @register_evaluation("zero-shot")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ZeroShot(ModelEvaluation):
        ...

`medvl eval NAME`, its page, its columns in `medvl benchmark` and its place in `medvl compare` are
made from the class. medvl's own modules are imported on first use. Another package adds evaluations
with the entry point group `medvl.evaluations`, for example in its pyproject.toml:

    [project.entry-points."medvl.evaluations"]
    my-evaluation = "my_package.my_evaluation:MyEvaluation"
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from medvl.common.registry import Registry

if TYPE_CHECKING:
    from medvl.eval.evaluation import Evaluation

_MODULES = {
    "zero-shot": "medvl.eval.zero_shot_classification.evaluation",
    "retrieval": "medvl.eval.retrieval.evaluation",
    "grounding": "medvl.eval.grounding.evaluation",
    "volume-grounding": "medvl.eval.grounding.volumes",
    "probe": "medvl.eval.probing.evaluation",
    "neighbours": "medvl.eval.probing.neighbours",
    "change": "medvl.eval.change.evaluation",
    "matching": "medvl.eval.matching",
    "vqa": "medvl.eval.vqa.evaluation",
    "multiple-choice": "medvl.eval.vqa.multiple_choice",
    "report-generation": "medvl.eval.report_generation.evaluation",
    "classify": "medvl.eval.classification.evaluation",
    "class-retrieval": "medvl.eval.retrieval.evaluation",
    "detection": "medvl.eval.dense.evaluation",
    "segmentation": "medvl.eval.dense.evaluation",
    "zero-shot-masks": "medvl.eval.zero_shot_masks",
    "robustness": "medvl.eval.robustness.evaluation",
    "text": "medvl.eval.text_tasks.evaluation",
    "text-retrieval": "medvl.eval.text_retrieval",
    "generation": "medvl.eval.generation.evaluation",
    "masked-prediction": "medvl.eval.masked_prediction",
}
"""Name of a built-in evaluation -> module that defines it, in the order of the help."""

EVALUATIONS: Registry["Evaluation"] = Registry(
    "medvl.eval.evaluation:Evaluation",
    kind="evaluation",
    modules=_MODULES,
    group="medvl.evaluations",
    decorator="register_evaluation",
)
"""The evaluations by name."""
list_evaluations = EVALUATIONS.names
evaluation_class = EVALUATIONS.get

Class = TypeVar("Class", bound="type[Evaluation]")


def register_evaluation(name: str) -> Callable[[Class], Class]:
    """Register the decorated `Evaluation` under `name`, the name of its command.

    Raises ConfigError where the name belongs to another class.
    """

    def register(cls: Class) -> Class:
        EVALUATIONS.register(name, cls)
        cls.protocols = cls.protocols or (name.replace("-", "_"),)
        return cls

    return register


def evaluation_of(protocol: str) -> "type[Evaluation] | None":
    """Return the evaluation whose results name a protocol; None if there is none."""
    return next((cls for cls in EVALUATIONS.classes() if protocol in cls.protocols), None)
