"""The 111 Harvard-Oxford regions of ABIDE's ``rois_ho`` files: ids and names, as data.

Cortical ids are 100 times the region's number in the atlas plus 1 or 2 for the hemisphere;
subcortical ids are FreeSurfer's. The files carry ids only. That 1 is right and 2 is left is
inferred: cortical regions ending in 2 correlate more with the left subcortical region beside them
(putamen, accumbens, hippocampus) than those ending in 1 do. Id 3455 is no label of the atlas: it
equals 3401 + 54, as voxels in both the right anterior parahippocampal gyrus and the right
amygdala would get if the two label maps were added. It is named by its id.
"""

__all__ = ["ATLAS", "ROIS"]

ATLAS = "Harvard-Oxford, 111 regions (ABIDE rois_ho)"

_CORTICAL = (
    "Frontal Pole",
    "Insular Cortex",
    "Superior Frontal Gyrus",
    "Middle Frontal Gyrus",
    "Inferior Frontal Gyrus pars triangularis",
    "Inferior Frontal Gyrus pars opercularis",
    "Precentral Gyrus",
    "Temporal Pole",
    "Superior Temporal Gyrus anterior division",
    "Superior Temporal Gyrus posterior division",
    "Middle Temporal Gyrus anterior division",
    "Middle Temporal Gyrus posterior division",
    "Middle Temporal Gyrus temporooccipital part",
    "Inferior Temporal Gyrus anterior division",
    "Inferior Temporal Gyrus posterior division",
    "Inferior Temporal Gyrus temporooccipital part",
    "Postcentral Gyrus",
    "Superior Parietal Lobule",
    "Supramarginal Gyrus anterior division",
    "Supramarginal Gyrus posterior division",
    "Angular Gyrus",
    "Lateral Occipital Cortex superior division",
    "Lateral Occipital Cortex inferior division",
    "Intracalcarine Cortex",
    "Frontal Medial Cortex",
    "Juxtapositional Lobule Cortex (formerly Supplementary Motor Cortex)",
    "Subcallosal Cortex",
    "Paracingulate Gyrus",
    "Cingulate Gyrus anterior division",
    "Cingulate Gyrus posterior division",
    "Precuneous Cortex",
    "Cuneal Cortex",
    "Frontal Orbital Cortex",
    "Parahippocampal Gyrus anterior division",
    "Parahippocampal Gyrus posterior division",
    "Lingual Gyrus",
    "Temporal Fusiform Cortex anterior division",
    "Temporal Fusiform Cortex posterior division",
    "Temporal Occipital Fusiform Cortex",
    "Occipital Fusiform Gyrus",
    "Frontal Operculum Cortex",
    "Central Opercular Cortex",
    "Parietal Operculum Cortex",
    "Planum Polare",
    "Heschl's Gyrus (includes H1 and H2)",
    "Planum Temporale",
    "Supracalcarine Cortex",
    "Occipital Pole",
)

_SUBCORTICAL = {
    10: "Left Thalamus",
    11: "Left Caudate",
    12: "Left Putamen",
    13: "Left Pallidum",
    17: "Left Hippocampus",
    18: "Left Amygdala",
    26: "Left Accumbens",
    49: "Right Thalamus",
    50: "Right Caudate",
    51: "Right Putamen",
    52: "Right Pallidum",
    53: "Right Hippocampus",
    54: "Right Amygdala",
    58: "Right Accumbens",
}


def _regions() -> tuple[tuple[str, str], ...]:
    """Return (id, name) of every region in the order of the files, which is that of the ids."""
    names = dict(_SUBCORTICAL)
    for number, name in enumerate(_CORTICAL, start=1):
        names[100 * number + 1] = f"Right {name}"
        names[100 * number + 2] = f"Left {name}"
    names[3455] = "label 3455"
    return tuple((str(roi_id), names[roi_id]) for roi_id in sorted(names))


ROIS = _regions()
