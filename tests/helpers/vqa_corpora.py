"""Small VQA corpora in the layouts of their releases, including typical errors."""

import json
import pickle
from pathlib import Path
from typing import Any

import cv2

from helpers.mimic_files import textured
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.questions import vqa_rad
from medvl.data.privacy import Deidentifier


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), textured(seed, 70, 90))


def rad_row(qid: Any, image: str, question: str, answer: Any, **fields: Any) -> dict[str, Any]:
    """Return a row of MEVF's files; the original release has more fields."""
    row = {"qid": qid, "image_name": image, "image_organ": "CHEST", "answer": answer,
        "answer_type": "OPEN",
           "question_type": "PRES", "question": question, "phrase_type": "freeform"}  # fmt: skip
    return row | fields


RAD_TRAIN = [
    rad_row(1, "synpic1.jpg", "Is the heart enlarged? -yes/no", "Yes", answer_type="CLOSED "),
    rad_row(2, "synpic1.jpg", "How many masses?", 2, question_type="COUNT"),
    rad_row(
        3,
        "synpic1.jpg",
        "Where is the mass? -Open",
        "right lung ",
        question_type="PRES, POS",
        phrase_type="frame",
    ),
    rad_row(4, "synpic2.jpg", "Is it the patient\ufffds heart?", "NULL", question_type="PRSE"),
    rad_row(
        5, "synpic2.jpg", "What is the plane?", "None", question_type="Other", image_organ="HEAD"
    ),
    rad_row(6, "synpic1.jpg", "is the heart  enlarged?", "yes", answer_type="CLOSED"),
]
RAD_TEST = [
    rad_row(7, "synpic1.jpg", "Is there fluid?", "No", answer_type="CLOSED"),
    rad_row(
        8,
        "synpic1.jpg",
        "Where is the mass?",
        "right lung",
        question_type="ATRIB",
        phrase_type="para",
    ),
]
RAD_WARNINGS = {
    "answer_type_padded": 1, "question_suffix": 2, "answer_number": 1, "no_answer": 1,
    "broken_character": 1, "question_type_misspelt": 4, "duplicate": 1, "also_in_train": 1,
}  # fmt: skip


def write_rad(root: Path, form: str = "mevf") -> Path:
    """Write MEVF's two files, or the original one with its additional fields."""
    folder = root / ("images" if form == "mevf" else "VQA_RAD Image Folder")
    for number in (1, 2):
        write_image(folder / f"synpic{number}.jpg", number)
    if form == "mevf":
        (root / "trainset.json").write_text(json.dumps(RAD_TRAIN))
        (root / "testset.json").write_text(json.dumps(RAD_TEST))
        return root
    original_fields = {"qid_linked_id": "03f45x",
        "image_case_url": "https://medpix.nlm.nih.gov/case?id=1", "evaluation": "given",
            "question_rephrase": "NULL", "question_relation": "NULL",
            "question_frame": "NULL"}  # fmt: skip
    rows = [original_fields | row for row in RAD_TRAIN]
    rows += [
        original_fields | row | {"phrase_type": f"test_{row['phrase_type']}"} for row in RAD_TEST
    ]
    rows[0]["qid"] = "1"
    (root / "VQA_RAD Dataset Public.json").write_text(json.dumps(rows))
    return root


def write_rad_shards(home: Path) -> Path:
    """Write shards of that VQA-RAD, which splits questions instead of images."""
    deid = Deidentifier(bytes(32))
    plan = vqa_rad.VQARAD(root=write_rad(home / "rad")).plan(deid)
    write_shards(
        plan, deid, ShardRun(out=home / "shards", workers=1), ShardOptions(keep_textless=True)
    )
    return home / "shards" / "mixed"


def slake_row(qid: int, image: int, question: str, answer: str, **fields: Any) -> dict[str, Any]:
    row = {"img_id": image, "img_name": f"xmlab{image}/source.jpg", "question": question,
        "answer": answer,
           "q_lang": "en", "location": "Lung", "modality": "X-Ray", "answer_type": "OPEN",
           "base_type": "vqa", "content_type": "Organ", "triple": ["vhead", "_", "_"],
           "qid": qid}  # fmt: skip
    return row | fields


SLAKE = {
    "train": [
        slake_row(0, 1, "Which organ is shown?", "Lung"),
        slake_row(1, 1, "图中是什么器官?", "肺", q_lang="zh"),
        slake_row(
            2, 2, "Is this MRI?", "No", answer_type="CLOSED", content_type="Modality", modality="CT"
        ),
    ],
    "validate": [
        slake_row(3, 3, "What treats it?", "Antibiotics", base_type="kvqa", content_type="KG")
    ],
    "test": [slake_row(1622, 4, "Where is it?", "", content_type="Position")],
}


def write_slake(root: Path, validate: str = "validate.json") -> Path:
    for split, rows in SLAKE.items():
        name = validate if split == "validate" else f"{split}.json"
        (root / name).write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        for row in rows:
            write_image(root / "imgs" / row["img_name"], row["img_id"])
    return root


def write_vqa_med(root: Path) -> Path:
    """Write two unpacked archives and the test folder of the repository."""
    train, val = (
        root / "ImageClef-2019-VQA-Med-Training",
        root / "ImageClef-2019-VQA-Med-Validation",
    )
    test = root / "VQAMed2019Test"
    files = {
        train
        / "QAPairsByCategory"
        / "C1_Modality_train.txt": "synpic1|is this a t1 weighted image?|no\r\n",
        train
        / "QAPairsByCategory"
        / "C2_Plane_train.txt": "synpic1|in what plane is this?|axial\r\n",
        train
        / "QAPairsByCategory"
        / "C3_Organ_train.txt": "synpic1|what organ is shown?|lung, mediastinum, pleura\n\n",
        train
        / "QAPairsByCategory"
        / "C4_Abnormality_train.txt": "synpic2|what is alarming?|mass | cyst\n",
        train / "All_QA_Pairs_train.txt": "not read: the four files have the same questions with "
        "categories\n",
        val
        / "QAPairsByCategory"
        / "C1_Modality_val.txt": "synpic3|what modality is shown?|xr - plain film\n",
        test / "VQAMed2019_Test_Questions_w_Ref_Answers.txt": (
            "synpic4|abnormality|what is abnormal?|(large) mass#cyst\nsynpic4|organ|what "
            "organ?|spine and contents\n"
        ),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for folder, numbers in ((train / "Train_images", (1, 2)), (val / "Val_images", (3,)),
                            (test / "VQAMed2019_Test_Images", (4,))):  # fmt: skip
        for number in numbers:
            write_image(folder / f"synpic{number}.jpg", number)
    return root


PATH_ROWS = {
    "train": [
        {"image": "train_0001", "question": "What is shown?", "answer": "liver"},
        {"image": "train_0001", "question": "What is shown?", "answer": "liver"},
        {"image": "train_0001", "question": "is fat present?", "answer": "yes"},
    ],
    "val": [{"image": "val_0001", "question": "where are cells?", "answer": "in the lobule"}],
    "test": [{"image": "test_0001", "question": "is it necrosis?", "answer": "no"}],
}


def write_path_vqa(root: Path, form: str = "qa.pkl", protocol: int = 4) -> Path:
    for part, rows in PATH_ROWS.items():
        lxmert = [
            {"answer_type": "other", "img_id": row["image"], "label": {row["answer"]: 1},
            "question_id": 10**7 + number,
             "question_type": "what", "sent": row["question"]}
            for number, row in enumerate(rows)
        ]  # fmt: skip
        folder = root / "qas" / part if form.startswith("qa.") else root / "qas"
        folder.mkdir(parents=True, exist_ok=True)
        path, content = folder / f"{part}_{form}", rows if form.startswith("qa.") else lxmert
        path.write_bytes(
            pickle.dumps(content, protocol)
            if form.endswith("pkl")
            else json.dumps(content).encode()
        )
        for row in rows:
            path = root / "images" / part / f"{row['image']}.jpg"
            write_image(path, len(row["question"]))
            stained_HWC = cv2.applyColorMap(cv2.imread(str(path)), cv2.COLORMAP_PINK)
            assert cv2.imwrite(str(path), stained_HWC)
    return root
