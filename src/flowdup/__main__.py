from flowdup.cli import main

main()
