"""Sentence templates of reports.

`[a|b|]` is a free choice, and `{slot}` is filled from the finding: {severity} an adjective of
severity, {size} one of amount, {side} right, left or bilateral, {where} the place as a noun ("left
lower lobe"), {basal} the place as an adjective ("left basilar"), {cm} a length, {count} a number
word.
"""

SEVERITY_WORDS = {
    "mild": "[mild|mild|minimal]",
    "moderate": "[moderate|moderate]",
    "severe": "[severe|marked]",
}
SEVERITY_ADVERBS = {
    "mild": "[mildly|slightly]",
    "moderate": "moderately",
    "severe": "[severely|markedly]",
}
SIZE_WORDS = {
    "mild": "[small|tiny|trace|minimal]",
    "moderate": "[moderate|moderate-sized|medium-sized]",
    "severe": "[large|very large|substantial]",
}

Templates = tuple[str, ...]

PRESENT: dict[str, dict[str, Templates]] = {
    "Atelectasis": {
        "bands": (
            "[There is |]{severity} {basal} atelectasis.",
            "[Linear|Band-like|Plate-like] atelectasis is [seen|present|noted] at the {where}.",
            "Streaky {basal} opacities [are consistent with|reflect|represent] {severity} "
            "atelectasis.",
            "{severity} subsegmental atelectasis at the {where}.",
            "Low lung volumes with {severity} {basal} atelectasis.",
            "Linear densities at the {where} are compatible with atelectasis.",
        ),
        "collapse": (
            "[There is |]collapse of the {where} with volume loss.",
            "Complete atelectasis of the {where}[| with associated volume loss].",
            "{where} collapse[| with shift of the mediastinum towards that side].",
            "Dense opacity with volume loss [is consistent with|represents] {where} atelectasis.",
        ),
    },
    "Cardiomegaly": {
        "any": (
            "[There is |]{severity} cardiomegaly.",
            "The [heart|cardiac silhouette] is {severity_adverb} enlarged.",
            "{severity} enlargement of the [cardiac silhouette|heart] is [seen|present|noted].",
            "Heart size is {severity_adverb} [enlarged|increased].",
            "The cardiac silhouette [shows|demonstrates] {severity} enlargement.",
        )
    },
    "Consolidation": {
        "any": (
            "[There is |]{severity} consolidation [in|involving] the {where}.",
            "{where} consolidation[| with air bronchograms].",
            "Dense consolidation is [seen|present|noted] in the {where}.",
            "Airspace consolidation in the {where}[| with air bronchograms].",
            "The {where} [shows|demonstrates] {severity} consolidation.",
            "Confluent opacity in the {where} [represents|is consistent with] consolidation.",
        )
    },
    "Edema": {
        "any": (
            "[There is |]{severity} [pulmonary|interstitial] edema.",
            "{severity} pulmonary vascular congestion and edema.",
            "[Perihilar|Bilateral perihilar] haziness [consistent with|compatible with|in keeping "
            "with] {severity} pulmonary edema.",
            "[Bilateral|Diffuse] interstitial opacities with Kerley B lines [reflect|represent] "
            "{severity} edema.",
            "Indistinct pulmonary vasculature [is consistent with|indicates] {severity} edema.",
            "Findings of {severity} pulmonary edema[| are present].",
        )
    },
    "Enlarged Cardiomediastinum": {
        "any": (
            "[There is |]{severity} widening of the [mediastinum|upper mediastinum|superior "
            "mediastinum].",
            "The mediastinum is {severity_adverb} widened.",
            "The [mediastinal contour|cardiomediastinal contour] is {severity_adverb} "
            "[enlarged|widened].",
            "Prominent [tortuous|ectatic] aorta with {severity} mediastinal widening.",
        )
    },
    "Fracture": {
        "rib": (
            "[There is |]a [displaced|mildly displaced] fracture of the {where}.",
            "Fracture of the {where} is [seen|present|noted].",
            "{where} fracture[| with mild displacement].",
        ),
        "ribs": (
            "[There are |][multiple|several] {side} rib fractures.",
            "Fractures of [multiple|several] {side} ribs are [seen|present|noted].",
            "Displaced rib fractures involving the {where}.",
        ),
        "clavicle": (
            "[There is |]a displaced fracture of the {side} clavicle.",
            "{side} clavicular fracture[| is noted].",
        ),
    },
    "Lung Lesion": {
        "nodule": (
            "[There is |]a {cm} cm [nodule|pulmonary nodule] in the {where}.",
            "A {cm} cm rounded nodule projects over the {where}.",
            "{where} nodule measuring {cm} cm.",
        ),
        "mass": (
            "[There is |]a {cm} cm mass in the {where}.",
            "A large mass measuring {cm} cm projects over the {where}.",
            "{where} mass measuring [up to |]{cm} cm.",
        ),
        "several": (
            "[There are |][{count}|multiple] pulmonary nodules, the largest measuring {cm} cm "
            "in the {where}.",
            "{count} rounded nodules are seen, the largest {cm} cm.",
            "Multiple pulmonary nodules measuring up to {cm} cm.",
        ),
    },
    "Lung Opacity": {
        "any": (
            "[There is |]a [hazy|ill-defined|vague] opacity in the {where}.",
            "Hazy opacification of the {where}.",
            "Increased opacity [projects over|is seen in] the {where}.",
            "{severity} ground-glass opacity in the {where}.",
        )
    },
    "Pleural Effusion": {
        "one": (
            "[There is |]a {size} {side} pleural effusion.",
            "{size} {side} pleural effusion[| is present| is seen| is noted].",
            "{size} {side}-sided effusion.",
            "[Blunting of {angles}|Obscuration of the {side} hemidiaphragm] "
            "[is consistent with|reflects] a {size} pleural effusion.",
        ),
        "both": (
            "[There are |]{size} bilateral pleural effusions.",
            "Bilateral pleural effusions, {larger} greater than {smaller}.",
            "Bilateral pleural effusions are [seen|present|noted], {size} on the {larger}.",
            "{size} bilateral effusions[| with meniscus formation].",
        ),
    },
    "Pleural Other": {
        "thickening": (
            "[There is |]{severity} pleural thickening along the {where}.",
            "{severity} {side} pleural thickening[| is noted].",
        ),
        "apical cap": (
            "[There is |]{severity} {side} apical pleural thickening.",
            "{side} apical [pleural cap|pleural scarring] is [seen|noted].",
        ),
        "plaque": (
            "Calcified pleural plaques are [seen|noted] {on_side}.",
            "[There are |]calcified {side} pleural plaques[|, suggesting prior asbestos exposure].",
        ),
    },
    "Pneumonia": {
        "any": (
            "{where} [pneumonia|bronchopneumonia].",
            "Patchy opacities in the {where} [are consistent with|compatible with|in keeping "
            "with] pneumonia.",
            "Findings [are compatible with|are consistent with|indicate] pneumonia in the {where}.",
            "Multifocal airspace opacities in the {where} [represent|consistent with] pneumonia.",
        )
    },
    "Pneumothorax": {
        "any": (
            "[There is |]a {size} {side} [pneumothorax|apical pneumothorax].",
            "{size} {side} pneumothorax[| is present| is seen].",
            "A [thin|visible] pleural line on the {side} [is consistent with|indicates] a "
            "{size} pneumothorax.",
        ),
        "tension": (
            "[There is |]a large {side} pneumothorax with shift of the mediastinum.",
            "Large {side} pneumothorax[| with collapse of the underlying lung][|, concerning "
            "for tension].",
        ),
    },
    "Support Devices": {
        "endotracheal tube": (
            "[The |]endotracheal tube [terminates|ends|tip is] {cm} cm above the carina.",
            "ET tube [is in standard position|in place], {cm} cm above the carina.",
        ),
        "enteric tube": (
            "[The |][enteric|nasogastric|orogastric] tube [terminates in the stomach|courses "
            "below the diaphragm].",
            "[A nasogastric|An orogastric] tube [ends in|is seen in] the stomach.",
        ),
        "central line": (
            "[A |]{side} {line} [terminates|ends] in the [SVC|superior vena cava|mid SVC|lower "
            "SVC].",
            "Tip of the {side} {line} is in the [SVC|superior vena cava].",
        ),
        "pacemaker": (
            "[A |]{side}-sided [pacemaker|pacer|ICD] is [in place|seen] with leads in "
            "[standard|expected] position.",
            "{side} pectoral [pacemaker|pacing device] [with leads in place|is noted].",
        ),
        "chest tube": (
            "[A |]{side} chest tube is [in place|present|seen].",
            "{side}-sided [chest tube|pleural drain] remains in place.",
        ),
        "sternotomy wires": (
            "[Median s|S]ternotomy wires are [intact|in place|aligned].",
            "The patient is status post median sternotomy with intact wires.",
        ),
    },
}
"""Label -> form -> sentences that assert the finding."""

UNCERTAIN: dict[str, Templates] = {
    "Atelectasis": (
        "{basal} opacity may [represent|reflect] atelectasis.",
        "Possible {basal} atelectasis.",
        "Streaky {basal} opacities [are possibly|may be] atelectasis.",
    ),
    "Cardiomegaly": (
        "[Possible|Questionable] mild cardiomegaly.",
        "The heart may be mildly enlarged[|, although this could be projectional].",
    ),
    "Consolidation": (
        "[Possible|Questionable] consolidation in the {where}.",
        "Opacity in the {where} could represent [early |]consolidation.",
    ),
    "Edema": (
        "[Possible|Questionable] [mild|early] pulmonary edema.",
        "Mild vascular prominence may represent [early|mild] pulmonary edema.",
    ),
    "Enlarged Cardiomediastinum": (
        "The mediastinum may be [slightly |]widened[|, possibly due to projection].",
        "[Possible|Questionable] mediastinal widening.",
    ),
    "Fracture": ("[Possible|Questionable] {side} [rib fracture|fracture].",),
    "Lung Lesion": (
        "[Possible|Questionable] nodule in the {where}.",
        "A rounded density in the {where} may represent a nodule.",
    ),
    "Lung Opacity": ("[Possible|Questionable] faint opacity in the {where}.",),
    "Pleural Effusion": (
        "[Possible|Questionable] [trace|small] {side} pleural effusion.",
        "Slight blunting of {angles} may represent a small effusion.",
    ),
    "Pleural Other": ("[Possible|Questionable] {side} pleural thickening.",),
    "Pneumonia": (
        "Opacity in the {where} [may represent|could represent|is concerning for|is suspicious "
        "for] pneumonia.",
        "Possible pneumonia in the {where}.",
        "Patchy opacity in the {where}, pneumonia [cannot be excluded|is not excluded|is "
        "possible].",
        "{where} opacity may be due to [pneumonia|aspiration pneumonia] in the appropriate "
        "clinical setting.",
    ),
    "Pneumothorax": (
        "[Possible|Questionable] tiny {side} pneumothorax.",
        "A tiny {side} apical pneumothorax cannot be excluded.",
    ),
}
"""Label -> hedged sentences about a present finding. A sentence that names an opacity asserts
the opacity.
"""

HEDGED: dict[str, Templates] = {
    "Pneumonia": (
        "Superimposed pneumonia cannot be [entirely |]excluded.",
        "Early pneumonia is not excluded.",
    ),
    "Pleural Effusion": ("A [trace|small] pleural effusion cannot be excluded.",),
    "Atelectasis": ("Minimal basilar atelectasis is possible.",),
    "Edema": ("Mild vascular congestion or early edema is difficult to exclude.",),
    "Pneumothorax": ("A small pneumothorax is difficult to exclude on this [supine |]view.",),
}
"""Label -> hedged sentences about an absent finding."""

ABSENT: dict[tuple[str, ...], Templates] = {
    ("Pleural Effusion", "Pneumothorax"): (
        "There is no pleural effusion or pneumothorax.",
        "No pleural effusion or pneumothorax[| is seen| is identified].",
        "The pleural surfaces are clear without effusion or pneumothorax.",
    ),
    ("Consolidation", "Pleural Effusion", "Pneumothorax"): (
        "There is no [focal |]consolidation, [pleural effusion|effusion], or pneumothorax.",
        "No focal consolidation, [pleural effusion|effusion], or pneumothorax[| is seen].",
        "No evidence of consolidation, effusion, or pneumothorax.",
    ),
    ("Consolidation",): (
        "There is no [focal |]consolidation.",
        "No [focal |]consolidation[| is seen| is identified].",
    ),
    ("Lung Opacity",): (
        "[The lungs are|Lungs are|Both lungs are] [clear|well expanded and clear].",
        "The lungs are well-aerated and clear.",
    ),
    ("Edema",): (
        "There is no [pulmonary edema|evidence of pulmonary edema|overt edema].",
        "No [overt |]pulmonary edema[| is seen].",
    ),
    ("Edema", "Pneumonia"): (
        "No [evidence of |]pulmonary edema or pneumonia.",
        "There is no pneumonia or edema.",
    ),
    ("Pneumonia",): (
        "No [evidence of |][acute |]pneumonia.",
        "There is no radiographic evidence of pneumonia.",
    ),
    ("Pleural Effusion",): (
        "There is no [large |]pleural effusion.",
        "No pleural effusion[| is seen].",
        "The costophrenic angles are [sharp|clear].",
    ),
    ("Pneumothorax",): ("There is no [evidence of |]pneumothorax.", "No pneumothorax[| is seen]."),
    ("Atelectasis",): ("There is no [significant |]atelectasis.", "No atelectasis."),
    ("Cardiomegaly",): (
        "[The heart|Heart size|The cardiac silhouette] is [normal|within normal limits|not "
        "enlarged].",
        "No cardiomegaly.",
    ),
    ("Cardiomegaly", "Enlarged Cardiomediastinum"): (
        "[The cardiomediastinal silhouette|Cardiomediastinal silhouette|The cardiomediastinal "
        "contour] is [normal|within normal limits|unremarkable].",
        "Heart size and mediastinal contours are [normal|within normal limits|unremarkable].",
        "The cardiac, mediastinal and hilar contours are [normal|unremarkable].",
    ),
    ("Enlarged Cardiomediastinum",): (
        "[The m|M]ediastinal contours are [normal|unremarkable].",
        "The mediastinum is [not widened|normal in width].",
    ),
    ("Fracture",): (
        "No [acute |displaced |]rib fracture[| is identified].",
        "[The osseous structures|The bony structures|Imaged bones] are intact.",
    ),
    ("Lung Lesion",): ("No [suspicious |]pulmonary nodule or mass.",),
    ("Pleural Other",): (
        "No pleural thickening.",
        "There is no pleural thickening or calcification.",
    ),
}
"""Labels -> sentences that negate all of them."""

NORMAL = (
    "No acute cardiopulmonary [process|abnormality|disease|findings].",
    "No acute [intrathoracic|cardiopulmonary] [process|abnormality].",
    "Normal chest [radiograph|x-ray|examination].",
    "No evidence of acute [cardiopulmonary|intrathoracic] disease.",
)
"""Impressions of a chest without findings."""

FILLER = (
    "The imaged upper abdomen is unremarkable.",
    "Degenerative changes are [seen|noted] in the thoracic spine.",
    "The aorta is [mildly tortuous|calcified at the arch].",
    "The trachea is midline.",
    "The hila are [normal|unremarkable].",
    "Surgical clips project over the right upper quadrant.",
)
"""Sentences without any label."""

CHANGES: dict[str, Templates] = {
    "new": (", new [since|from|compared to] [the prior study|___].",),
    "worse": (", [increased|worsened|progressed] [since|compared to] [the prior study|___].",),
    "better": (", [improved|decreased] [since|compared to] [the prior study|___].",),
    "same": (
        ", [unchanged|stable|not significantly changed] [since|from|compared to] [the prior "
        "study|___].",
    ),
}
RESOLVED = "[Previously seen|Prior] {name} [has resolved|is no longer seen]."

NAMES = {
    "Atelectasis": "atelectasis", "Cardiomegaly": "cardiomegaly", "Consolidation": "consolidation",
    "Edema": "pulmonary edema", "Enlarged Cardiomediastinum": "mediastinal widening",
    "Fracture": "fracture", "Lung Lesion": "lung nodule", "Lung Opacity": "lung opacity",
    "Pleural Effusion": "pleural effusion", "Pleural Other": "pleural thickening",
    "Pneumonia": "pneumonia", "Pneumothorax": "pneumothorax", "Support Devices": "support devices",
}  # fmt: skip
"""Label -> its name within a sentence or a question."""


# Templates of the other sections of a report, in the form of `lexicon` without slots.

INDICATIONS = (
    "[shortness of breath|dyspnea|SOB]",
    "[chest pain|pleuritic chest pain]",
    "[fever|fever and cough|cough and fever] // [pneumonia?|eval for pneumonia|please evaluate "
    "for infiltrate]",
    "[CHF|heart failure] // [eval for pulmonary edema|volume status?|assess for edema]",
    "[s/p fall|MVC|trauma] // [fracture? pneumothorax?|eval for rib fracture]",
    "s/p [CABG|thoracotomy|line placement] // [interval change|eval for effusion|line position?]",
    "[altered mental status|weakness|syncope]",
    "history of [malignancy|lung cancer] // [eval for progression|metastases?]",
    "[preoperative evaluation|pre-op]",
)

EXAMINATIONS = {
    "two views": "[CHEST (PA AND LAT)|CHEST RADIOGRAPHS|Chest:  Frontal and lateral views]",
    "PA": "[CHEST (PA)|CHEST RADIOGRAPH|CHEST (SINGLE VIEW)]",
    "AP": "[CHEST (PORTABLE AP)|CHEST RADIOGRAPH|PORTABLE CHEST]",
}
TECHNIQUES = {
    "two "
    "views": "[Chest PA and lateral|Frontal and lateral views of the chest|PA and lateral views].",
    "PA": "[Single PA view of the chest|PA radiograph of the chest].",
    "AP": "[Single AP view of the chest|Portable AP chest radiograph|Portable upright AP view].",
}
COMPARISONS = "[___|Chest radiograph ___|Multiple priors, most recent ___]."
CLOSINGS = (
    "NOTIFICATION:  Findings discussed with Dr. ___ by phone at ___ on ___.",
    "RECOMMENDATION(S):  Follow-up as clinically indicated.",
    "Recommend follow-up as clinically indicated.",
)
ADDENDUM = "ADDENDUM:  The referring physician Dr. ___ was informed of the result at ___ on ___."
