"""What memory a hundred rounds take, in a process in which no other test has run.

Its name keeps it out of pytest's search: `test_memory.py` starts it, for whatever another test's
threads allocate meanwhile would be counted, too.
"""

from __future__ import annotations

import gc
import tracemalloc

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.app_constant import AppConstants

from fedbn.flare.aggregator import FedBNAggregator
from fedbn.flare.job import to_arrays


def test_a_hundred_rounds_of_a_learner_and_the_server_need_no_more_memory(
    make_client, make_persistor, experiment
):
    settings = experiment(rounds=100, training={"batch_size": 48, "local_epochs": 1})
    persistor, context = make_persistor(settings)
    aggregator = FedBNAggregator()
    aggregator.handle_event(EventType.START_RUN, context)
    client = make_client(settings)
    client.ask("preflight")
    params = to_arrays(persistor.server(context).state())

    def one_round(number):
        nonlocal params
        aggregator.reset_stats()
        _, answer = client.ask("train", params, number, ["NYU"], {"NYU": number - 1})
        assert answer.meta[FLMetaKey.NUM_STEPS_CURRENT_ROUND] == 45
        answer.meta["client_name"] = "NYU"
        assert aggregator.accept_model(answer)
        mean = aggregator.aggregate_model()
        context.set_prop(AppConstants.CURRENT_ROUND, number, private=True, sticky=False)
        params = mean.params

    def traced():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    for number in range(10):
        one_round(number)
    tracemalloc.start()
    try:
        one_round(10)
        before = traced()
        for number in range(11, 100):
            one_round(number)
        growth = traced() - before
    finally:
        tracemalloc.stop()
    size = sum(array.nbytes for array in params.values())
    assert growth < 80_000, f"{growth} bytes in 89 rounds; the weights are {size}"
