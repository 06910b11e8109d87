"""Training with parameter servers: speed as a function of workers w and servers p.

The step of synchronous and the rate of asynchronous training as Optimus writes them, linear in their coefficients:

    synchronous, global batch M    T = t0 M/w + t1 + t2 w/p + t3 w + t4 p          steps of all workers together
    asynchronous                   T = t0 + t1 w/p + t2 w + t3 p                   step of one worker; speed = w / T

Source: Peng et al. 2018, EuroSys, "Optimus", section 3.2 (equations 3 and 4) and table 2 (ResNet-50, 40
containers; time in seconds). The step from first principles, for a model of S bytes: compute, push and pull of
S/p bytes per server and worker over the server's link, and the update. And the sizes to measure next: the points that
determine such a job best (D-optimal design).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.adapters.classics.speed_models import FittedSpeed, SpeedPoint, measured_times, variances_along
from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import Floats, fit_relative

OPTIMUS_SYNCHRONOUS = (1.02, 2.78, 4.92, 0.00, 0.02)
"""t0 .. t4 of ResNet-50: Peng et al. 2018, table 2. t0 is in seconds per sample, since M counts samples; the others in
seconds. The table does not print M; read so, 20 containers are fastest with 8 workers for an M of about 40, which is
what the paper's figure of them shows."""
OPTIMUS_ASYNCHRONOUS = (2.83, 3.92, 0.00, 0.11)
"""t0 .. t3 of ResNet-50: Peng et al. 2018, table 2 [s]."""


def synchronous_terms(num_workers: float, num_servers: float, global_batch: float = 1.0) -> tuple[float, ...]:
    """Factors of t0 .. t4: M/w, 1, w/p, w, p.

    Args:
        num_workers: Number of workers, w.
        num_servers: Number of servers, p.
        global_batch: Global batch size, M, in the unit of t0.
    """
    w, p = num_workers, num_servers
    return (global_batch / w, 1.0, w / p, w, p)


def asynchronous_terms(num_workers: float, num_servers: float) -> tuple[float, ...]:
    """Factors of t0 .. t3 in the step of one worker: 1, w/p, w, p."""
    return (1.0, num_workers / num_servers, num_workers, num_servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServerSetup:
    """A job on parameter servers, from first principles.

    Attributes:
        compute_s: Forward and backward of the *global* batch on one worker [s].
        fixed_compute_s: Time of a worker's step that does not depend on its share of the batch [s].
        model_bytes: Size of the parameters, S [bytes].
        server_bytes_per_s: Usable bandwidth of one server in one direction [bytes/s].
        worker_bytes_per_s: Usable bandwidth of one worker in one direction [bytes/s].
        update_s: Time to update the whole model by one server [s].
        latency_s: Latency of one message [s].
    """

    compute_s: float
    fixed_compute_s: float = 0.0
    model_bytes: float
    server_bytes_per_s: float
    worker_bytes_per_s: float = float("inf")
    update_s: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        # A step is predicted and a link of the catalogue: what else makes a job must keep the same bounds.
        times_s = (self.compute_s, self.fixed_compute_s, self.update_s, self.latency_s)
        assert min(*times_s, self.model_bytes) >= 0, self
        assert min(self.server_bytes_per_s, self.worker_bytes_per_s) > 0, self


def parameter_server_step_s(
    setup: ParameterServerSetup, num_workers: int, num_servers: int, *, synchronous: bool = True
) -> float:
    """Step of all workers together (synchronous) or of one worker (asynchronous) [s].

    synchronous:  compute/w + fixed + 2 max(w S / (p B_server), S / B_worker) + update/p + 2 p latency
    asynchronous: compute + fixed + 2 max(w' S / (p B_server), S / B_worker) + update w'/p + 2 p latency

    In a synchronous step all w workers push at once, gradients are added up and the model is updated once. An
    asynchronous worker computes its own whole batch, and each gradient updates the model. All but the workers that
    compute at that moment are sending; w' is found by iterating w' = w * (share of the step that is not computing),
    at least 1.

    Args:
        setup: Job and hardware.
        num_workers: Number of workers, w.
        num_servers: Number of servers, p.
        synchronous: Whether workers wait for each other.

    Source: the terms of Peng et al. 2018, section 3.2, without their fitted constants.
    """
    assert num_workers >= 1
    assert num_servers >= 1
    latencies_s = 2 * num_servers * setup.latency_s
    if synchronous:
        compute_s = setup.compute_s / num_workers + setup.fixed_compute_s
        moved_s = _transfer_s(setup, num_workers, num_servers)
        return compute_s + moved_s + setup.update_s / num_servers + latencies_s
    compute_s = setup.compute_s + setup.fixed_compute_s
    senders = float(num_workers)
    step_s = compute_s
    # A fixed point: how many workers send at once depends on the step, and the step on how many send.
    for _ in range(50):
        step_s = compute_s + _transfer_s(setup, senders, num_servers) + latencies_s
        step_s += setup.update_s * senders / num_servers
        senders = max(1.0, num_workers * (1 - compute_s / step_s)) if step_s > 0 else 1.0
    return step_s


def _transfer_s(setup: ParameterServerSetup, num_senders: float, num_servers: int) -> float:
    at_servers_s = num_senders * setup.model_bytes / (num_servers * setup.server_bytes_per_s)
    return 2 * max(at_servers_s, setup.model_bytes / setup.worker_bytes_per_s)


_SYNCHRONOUS_NAMES = ("t0 (M/w)", "t1 (constant)", "t2 (w/p)", "t3 (w)", "t4 (p)")
_ASYNCHRONOUS_NAMES = ("t0 (constant)", "t1 (w/p)", "t2 (w)", "t3 (p)")


def server_columns(points: Sequence[SpeedPoint], *, synchronous: bool, batch: float) -> Floats:
    """Factors of each coefficient, (points, coefficients).

    Args:
        points: Sizes with workers and servers.
        synchronous: Whether the form is the synchronous one.
        batch: Global batch size of the coefficients, M = 1.
    """
    without = [point for point in points if point.num_servers < 1]
    if without:
        raise InvalidSetupError(
            f"a parameter-server model needs num_servers of at least 1 at every point, got {without[0].num_servers}; "
            "give the column num_servers"
        )
    if synchronous:
        rows = [synchronous_terms(p.num_devices, p.num_servers, p.batch_size_global / batch) for p in points]
    else:
        rows = [asynchronous_terms(p.num_devices, p.num_servers) for p in points]
    return np.asarray(rows, dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimusModel:
    """Optimus' speed function, T linear in non-negative coefficients (Peng et al. 2018, equations 3 and 4).

    The step of a point is that of all workers together (synchronous) or of one worker (asynchronous).

    Attributes:
        synchronous: Whether the form is the synchronous one.
    """

    synchronous: bool = True

    @property
    def name(self) -> str:
        """Name of the form."""
        return "optimus-synchronous" if self.synchronous else "optimus-asynchronous"

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Non-negative least squares on relative error.

        Raises:
            InvalidSetupError: The points do not tell the coefficients apart; the message names them.
        """
        names = _SYNCHRONOUS_NAMES if self.synchronous else _ASYNCHRONOUS_NAMES
        times = measured_times(points, 2, self.name)
        batch = float(np.median([point.batch_size_global for point in points]))
        fit = fit_relative(server_columns(points, synchronous=self.synchronous, batch=batch), times, names)

        def terms(at: Sequence[SpeedPoint]) -> tuple[Floats, Floats]:
            """Factors of the coefficients, and the step [s]."""
            rows = server_columns(at, synchronous=self.synchronous, batch=batch)
            return rows, np.maximum(1e-12, rows @ fit.coefficients)

        def log_variances(at: Sequence[SpeedPoint]) -> Floats:
            rows, step_s = terms(at)
            return variances_along(rows, fit.covariance) / step_s**2

        return FittedSpeed(
            name=self.name,
            parameters=dict(zip(names, fit.coefficients.tolist(), strict=True)),
            log_times=lambda at: np.log(terms(at)[1]),
            log_variances=log_variances,
            log_spread=fit.log_spread,
            num_freedom=max(1, len(points) - len(names)),
        )


_DESIGN_RIDGE = 1e-6


def candidate_points(
    workers: Sequence[int], servers: Sequence[int], batch_size_global: float = 1.0
) -> tuple[SpeedPoint, ...]:
    """Every combination of workers and servers at a fixed global batch."""
    return tuple(
        SpeedPoint(num_devices=w, num_servers=p, batch_size_per_device=batch_size_global / w)
        for w in workers
        for p in servers
    )


def propose_points(
    candidates: Sequence[SpeedPoint],
    num_points: int,
    *,
    measured: Sequence[SpeedPoint] = (),
    theta: Sequence[float] = OPTIMUS_SYNCHRONOUS,
    synchronous: bool = True,
) -> tuple[SpeedPoint, ...]:
    """The next points to measure, by greedy growth and exchange of the determinant of the information matrix.

    With times whose *relative* error is constant, a point x informs by (x/T)(x/T)'; T is what ``theta`` expects there.
    maximise log det( sum_i (x_i/T_i)(x_i/T_i)' ) over the chosen and the measured points.

    Args:
        candidates: Sizes that could be measured.
        num_points: Number of points to choose, at most all candidates.
        measured: Points that are measured already.
        theta: Expected coefficients, for T; those of Optimus' ResNet-50 if none are known.
        synchronous: Whether the fitted form is the synchronous one.

    Raises:
        InvalidSetupError: There are fewer candidates than points, or they cannot determine the coefficients.

    Source: Fedorov 1972, Theory of Optimal Experiments (exchange); Atkinson and Donev 1992.
    """
    if not 1 <= num_points <= len(candidates):
        raise InvalidSetupError(
            f"expected between 1 and {len(candidates)} points of a design, got {num_points}; widen workers or servers"
        )
    batch = float(np.median([point.batch_size_global for point in candidates]))
    rows = _informative(server_columns(candidates, synchronous=synchronous, batch=batch), theta)
    start: Floats | float = 0.0
    if measured:
        known = server_columns(measured, synchronous=synchronous, batch=batch)
        start = _information(_informative(known, theta))
    # Fewer points than coefficients have no determinant; the ridge is too small to choose between points that do.
    base = start + _DESIGN_RIDGE * np.eye(rows.shape[1])
    chosen = _exchanged(rows, base, _grown(rows, base, num_points))
    rank = np.linalg.matrix_rank(start + _information(rows[chosen]), tol=1e-7)
    if rank < min(rows.shape[1], num_points + len(measured)):
        raise InvalidSetupError(
            "the candidates cannot tell the coefficients apart: workers and servers must both vary, and not together; "
            "give at least three numbers of each"
        )
    return tuple(candidates[i] for i in chosen)


def _informative(columns: Floats, theta: Sequence[float]) -> Floats:
    """Rows divided by the expected time, columns brought to a common size."""
    expected = columns @ np.maximum(np.asarray(theta, dtype=float), 1e-3)
    rows: Floats = columns / expected[:, None]
    return rows


def _information(rows: Floats) -> Floats:
    return rows.T @ rows


def _log_determinant(matrix: Floats) -> float:
    sign, value = np.linalg.slogdet(matrix)
    return float(value) if sign > 0 else -np.inf


def _grown(rows: Floats, base: Floats, num_points: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(num_points):
        left = [i for i in range(len(rows)) if i not in chosen]
        now = base + _information(rows[chosen])
        chosen.append(max(left, key=lambda i, now=now: _log_determinant(now + np.outer(rows[i], rows[i]))))  # type: ignore[misc]
    return chosen


def _exchanged(rows: Floats, base: Floats, chosen: list[int]) -> list[int]:
    """Swaps one chosen point for another candidate as long as the determinant grows."""
    chosen = list(chosen)
    improved = True
    while improved:
        improved = False
        for position in range(len(chosen)):
            others = [*chosen[:position], *chosen[position + 1 :]]
            now = base + _information(rows[others])
            left = [i for i in range(len(rows)) if i not in others]
            gains = [_log_determinant(now + np.outer(rows[i], rows[i])) for i in left]
            best = left[int(np.argmax(gains))]
            # A gain of rounding alone would let two equal points trade places for ever.
            if best != chosen[position] and max(gains) > gains[left.index(chosen[position])] + 1e-9:
                chosen[position] = best
                improved = True
    return chosen
