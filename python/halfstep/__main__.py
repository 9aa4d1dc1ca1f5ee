from halfstep import main

main()
