"""Sites that take long, with small deadlines, in FLARE's simulator: nobody's results are lost."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SLOW_ALONE = """
    import time

    from fedbn.flare.learner import FedBNLearner


    class Learner(FedBNLearner):
        def _train_alone(self, model):
            time.sleep(35)
            return super()._train_alone(model)
"""

SLOW_LARGE_SITE = """
    import time

    from fedbn.flare.learner import FedBNLearner


    class Learner(FedBNLearner):
        def _train(self, model):
            answer = super()._train(model)
            seconds = 8.0 if self.site_name == "site-3" else 2.0
            time.sleep(seconds)
            answer.meta["fedbn"]["seconds"] += seconds
            return answer
"""


def test_training_alone_may_take_five_times_the_deadline_of_a_round(simulation):
    run = simulation(
        rounds=6, compare_with_alone=True, learner=SLOW_ALONE, workflow={"round_seconds": 7}
    )
    run.run("-n", "2", "-t", "2").succeeded()
    assert run.results["status"] == "completed"
    for report in run.results["sites"].values():
        assert {"federated", "alone", "gain"} <= report.keys()


def test_a_quorum_does_not_leave_out_the_largest_site(simulation):
    run = simulation(
        sites=["NYU", "UM", "USM"],
        rounds=3,
        learner=SLOW_LARGE_SITE,
        workflow={"min_sites": 2, "grace_seconds": 3, "round_seconds": 90},
    )
    run.run("-n", "3", "-t", "3").succeeded()
    assert [record["accepted"] for record in run.results["rounds"]] == [["NYU", "UM", "USM"]] * 3
    assert sorted(run.results["sites"]) == ["NYU", "UM", "USM"]
