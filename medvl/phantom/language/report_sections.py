"""Templates of the other sections of a report, in the form of `lexicon` without slots."""

INDICATIONS = (
    "[shortness of breath|dyspnea|SOB]",
    "[chest pain|pleuritic chest pain]",
    "[fever|fever and cough|cough and fever] // [pneumonia?|eval for pneumonia|please evaluate for infiltrate]",
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
    "two views": "[Chest PA and lateral|Frontal and lateral views of the chest|PA and lateral views].",
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
