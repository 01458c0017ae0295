"""Bounds on the error of clients without labels: one file per route, pure functions of numbers.

held_out_clients  the mean error of a new client, from clients that nothing else has seen
client_quantile   how many clients have an error of at most e
prediction_sets   conformal sets of classes, the client being the exchangeable unit
own_thresholds    scores for them that know how sure a client's own model is
pac_bayes         the paper's theorems 1 and A.1, and tighter forms of them
compression       code lengths, as a prior for `pac_bayes`

Nothing here trains, samples or reads files: `run/certify.py` does.
"""
