"""What a client should know before it trusts its model: how much data it takes, and which data."""

from layout import Results, grid, origins, tenths


def set_sizes(results: Results) -> str:
    """Accuracy against how many unlabeled points a model is made from."""
    rows = results.bench("set-sizes")
    sizes = sorted({at["points"] for row in rows for at in row["curve"]})
    body = []
    for row in rows:
        means = {at["points"]: at["mean"] for at in row["curve"]}
        trained = f"{row['model']}, {row['rounds']} rounds, {row['clients']} clients"
        cells = [tenths(means[size]) if size in means else "" for size in sizes]
        body.append([row["data"], *cells, trained])
    return (
        grid(["accuracy, %", *map(str, sizes), "trained and scored"], body) + "\n" + origins(rows)
    )


def foreign(results: Results) -> str:
    """How many clients are called foreign, by kind and by how many points they have."""
    rows = results.bench("familiarity")
    sizes = sorted({row["points"] for row in rows})
    body = []
    for name in dict.fromkeys(row["clients"] for row in rows):
        cells = []
        for size in sizes:
            own = [row for row in rows if row["clients"] == name and row["points"] == size]
            found = sum(row["foreign"] for row in own) / sum(row["count"] for row in own)
            cells.append(tenths(100 * found))
        body.append([name, *cells])
    return grid(["called foreign, %; points", *map(str, sizes)], body) + "\n" + origins(rows)
