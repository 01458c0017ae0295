"""How long a round takes on a CPU, here and elsewhere: `make bench`.

Every contender does the same work: the same clients, cohorts and orders of points, float32, all
cores.  psi after the first round is compared, and if a contender's is further from the first's than
a thousandth of the way that the first's has come, the run fails.  ratio_to_pfl and ratio_to_flower
(the faster of its two variants) say how many times as fast a contender is, ratio_to_h1 how many
times as long as one forward pass of h1 a personalisation takes; all within the run.
With --against DIR, another checkout of flowdup, each contender of flowdup's own has a twin
"..., before" with that checkout's code, and ratio_to_before says how many times as fast as its twin
it is.
"""

import os

from bench import options, play, report
from contenders.work import Work
from contest import PERSONALIZERS, Match, Plan

PLAN = Plan(blocks=15)
MATCHES = {
    "fedavg cnn": Match(Work("fedavg"), plan=PLAN),
    # without clipping, a rate of 0.01 makes psi explode
    "flowdup cnn": Match(Work("flowdup", lr=5e-4), plan=PLAN),
    "fedavg cnn femnist": Match(Work.femnist(cohort=10, batch=20), plan=PLAN),
    "personalize cnn": Match(
        Work("flowdup", clients=1), PERSONALIZERS, Plan(warm_up=10, blocks=20, rounds=5)
    ),
}
BUSY = 0.5  # mean number of running processes


def main() -> None:
    chosen = options("How long a round takes on a CPU.", MATCHES, "cpu").parse_args()
    if os.getloadavg()[0] > BUSY and not chosen.tiny:
        print("The machine is busy with something else: these figures will not be worth much.")
    report(play(MATCHES, chosen), chosen.out)


if __name__ == "__main__":
    main()
