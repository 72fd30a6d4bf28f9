"""scikit-learn's checks of `method="auto"` at a small plan: python -m benchmarks.estimator_checks [--seconds 1].

The suite runs them for a fast fixed method (tests/estimators). Prints each check that fails or is skipped, with its
reason, and ends with 1 if one fails that is not expected to.
"""

import argparse
import logging
import time
import warnings

import torch
from sklearn.utils.estimator_checks import check_estimator

from posterity.estimators import BayesianClassifier, BayesianRegressor

EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "a row twice may lie in two folds, a row of weight 2 lies in one"
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="the budget of each fit")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    failures = 0
    for estimator in (
        BayesianRegressor(seconds=seconds, device="cpu"),
        BayesianClassifier(seconds=seconds, device="cpu"),
    ):
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = check_estimator(estimator, on_fail=None, expected_failed_checks=EXPECTED)
        counts = {}
        for result in results:
            status = result["status"]
            counts[status] = counts.get(status, 0) + 1
            failures += status == "failed"
            if status != "passed":
                reason = EXPECTED[result["check_name"]] if status == "xfail" else str(result["exception"])
                print(f"  {status}: {result['check_name']}: {' '.join(reason.split())[:200]}")
        listed = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        print(f"{type(estimator).__name__}, auto: {listed} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    raise SystemExit(main())
