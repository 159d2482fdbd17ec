"""A page in the browser for one image: findings, heat maps, answers, a report, and nearest
neighbours.

    medvl serve --checkpoint runs/convirt

Needs `medvl[serve]`. The guide is docs/pages/guides/serve.md.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.serve.app import create_app as create_app, open_models as open_models, serve as serve
    from medvl.serve.config import ServeConfig as ServeConfig
    from medvl.serve.models import Gallery as Gallery, ServedModel as ServedModel

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
