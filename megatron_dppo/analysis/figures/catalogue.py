"""Lists the figures. Numbers are those of arXiv 2602.04879: README.md says where they are established."""

from megatron_dppo.analysis.figures import (
    broader,
    clipped_list,
    engine_differences,
    mask_regions,
    relaxation,
    stability,
)
from megatron_dppo.analysis.figures.material import Kind

KINDS: tuple[Kind, ...] = (
    Kind("01_mask_regions", "the left of Figure 1", mask_regions.draw, needs_runs=False),
    Kind("02_engine_differences", "Figure 2", engine_differences.draw),
    Kind("03_stability", "Figure 3", stability.draw_stability),
    Kind("04_anchor", "Figure 4", stability.draw_anchor),
    Kind("05_bad_updates", "Figure 5", stability.draw_bad_updates),
    Kind("06_relaxation_threshold", "Figure 6", relaxation.draw_relaxation_threshold),
    Kind("07_relaxation_side", "Figure 7", relaxation.draw_relaxation_side),
    Kind("08_replay", "Figure 8, and the right of Figure 1", broader.draw_replay),
    Kind("09_models", "Figure 9", broader.draw_models),
    Kind("10_topk_scores", "Figure 10 (11 since version 3)", broader.draw_topk_scores),
    Kind("11_metrics", "Figures 11 to 15 (13 to 17 since version 3)", broader.draw_metrics),
    Kind("16_topk_metrics", "Figure 16 (18 since version 3)", broader.draw_topk_metrics),
    Kind("17_tasks", "Figure 17 (20 since version 3)", broader.draw_tasks),
    Kind("thresholds", "Figure 19 of version 3", broader.draw_sensitivity),
    Kind("clipped_tokens", "the lists of Appendix E (D since version 3)", clipped_list.draw),
)
